// A queue of requests, which are cut into blocks in the order of their priorities.
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
// Demand reads always come first. Prefetches and write-backs ("bulk" traffic) take turns, so that neither starves: an
// optimizer that streams its states reads as much as it writes. A part of the depth is reserved for demand reads: a
// demand read that arrives after gigabytes of bulk traffic is submitted at once, and waits only for the blocks that the
// drive already has. For the same reason, only a few megabytes of write-back are in flight if there are no prefetches:
// these keep a drive busy, and more would only make that wait longer (benchmarks/io_latency.py). If there are
// prefetches, which fill the rest of the bulk depth anyway, write-back may use half of it.
class BlockQueue {
  public:
    BlockQueue(std::size_t block_nbytes, int depth);

    // Adds a request. Returns true if a block can be started now; otherwise, try again when another block has ended.
    // Throws std::logic_error if the queue is closed.
    bool push(std::shared_ptr<Request> request);

    // Moves the rest of a read to the demand reads, because a thread waits for it now. Returns as `push` does.
    bool promote(const std::shared_ptr<Request>& request);

    // Takes the next block. Returns false if none can be started now.
    bool try_pop(Block& block);

    // Waits for the next block, and takes it. Returns false when the queue is closed and empty.
    bool pop(Block& block);

    // Records the end of a block; `error` is 0 or an errno. The last block of a request completes the request.
    void finish(const Block& block, int error);

    // Refuses further requests. Those in the queue are still served.
    void close();

    // Whether the queue is closed, and every request has ended.
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
    int bulk_in_flight_ = 0; // prefetches and write-backs
    int write_back_in_flight_ = 0;
    Priority last_bulk_ = Priority::write_back; // the one of the two that had the last turn
    bool closed_ = false;
};

} // namespace infinity::aio
