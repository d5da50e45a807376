// The seam through which tests make I/O go wrong. An engine that is given none behaves as the system does.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstddef>

namespace infinity::aio {

class Faults {
  public:
    struct Plan {
        std::size_t max_transfer = 0; // no system call is seen to move more than this; 0 for no limit
        int error = 0;                // errno that system call number `error_at` (from 1) ends with
        long error_at = 0;
        int interrupt_every = 0; // every n-th system call ends with EINTR
        int again_every = 0;     // every n-th system call ends with EAGAIN
    };

    explicit Faults(Plan plan) : plan_(plan) {}

    // What the engine gets to see of a system call's result (bytes, or a negative errno).
    long shorten(long result) const {
        return plan_.max_transfer == 0 ? result : std::min(result, static_cast<long>(plan_.max_transfer));
    }

    // The errno that the next system call is to end with instead of being made; 0 for none.
    int next();

  private:
    const Plan plan_;
    std::atomic<long> calls_{0};
};

} // namespace infinity::aio
