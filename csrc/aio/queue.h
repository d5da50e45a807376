// Requests waiting for their turn, cut into blocks in the order of their priorities.
#pragma once

#include <condition_variable>
#include <cstddef>
#include <deque>
#include <memory>
#include <mutex>

#include "request.h"

namespace infinity::aio {

// Thread-safe.
//
// A demand read comes first, always. Reads ahead and write-back take turns, so that neither starves: an optimizer that
// streams its states reads as much as it writes. A part of the depth is kept free of such bulk traffic: a demand read
// that arrives behind gigabytes of it is submitted at once, and waits only for what the drive already holds. That is
// why no more than a few megabytes of write-back are in flight alone: they keep a drive busy, and all beyond them would
// only lengthen that wait (benchmarks/io_latency.py). Beside reads ahead, which fill the rest of the bulk depth in any
// case, write-back may have half of it.
class BlockQueue {
  public:
    BlockQueue(std::size_t block_nbytes, int depth);

    // True if a block may be started now; if not, the end of another block is when to look again. Throws
    // std::logic_error once closed.
    bool push(std::shared_ptr<Request> request);

    // Somebody waits for this read now: what is left of it goes with the demand reads. Returns as `push` does.
    bool promote(const std::shared_ptr<Request>& request);

    // The next block, if there is one that may be started now.
    bool try_pop(Block& block);

    // Waits for a block; false when the queue is closed and empty.
    bool pop(Block& block);

    // The block is over; `error` is 0 or an errno. Completes the request with its last block.
    void finish(const Block& block, int error);

    // Takes no more requests; those that it has are served.
    void close();

    // Closed, and every request is over.
    bool drained() const;

  private:
    bool take(Block& block);
    int choose() const;
    void count_in_flight(Priority priority, int change);
    bool empty() const;
    void complete_if_over(const std::shared_ptr<Request>& request);

    const std::size_t block_nbytes_;
    const int depth_;
    const int bulk_depth_;
    const int write_back_depth_;
    mutable std::mutex mutex_;
    std::condition_variable changed_;
    std::deque<std::shared_ptr<Request>> waiting_[kPriorities];
    int in_flight_ = 0;
    int bulk_in_flight_ = 0; // of reads ahead and write-back
    int write_back_in_flight_ = 0;
    Priority last_bulk_ = Priority::write_back; // which of the two had its turn
    bool closed_ = false;
};

} // namespace infinity::aio
