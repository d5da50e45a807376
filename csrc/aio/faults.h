// Faults that tests inject into I/O. Without a plan, an engine behaves as the system does.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstddef>

namespace infinity::aio {

class Faults {
  public:
    struct Plan {
        std::size_t max_transfer = 0; // the most bytes that a system call seems to move; 0 for no limit
        int error = 0;                // errno of system call number `error_at` (from 1)
        long error_at = 0;
        int interrupt_every = 0; // every n-th system call ends with EINTR
        int again_every = 0;     // every n-th system call ends with EAGAIN
    };

    explicit Faults(Plan plan) : plan_(plan) {}

    // Returns the result that the engine sees of a system call (bytes, or a negative errno).
    long shorten(long result) const {
        return plan_.max_transfer == 0 ? result : std::min(result, static_cast<long>(plan_.max_transfer));
    }

    // Returns the errno that replaces the next system call; 0 to make the call.
    int next();

  private:
    const Plan plan_;
    std::atomic<long> calls_{0};
};

} // namespace infinity::aio
