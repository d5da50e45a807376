// A request (a read or a write), and the blocks that it is cut into.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

#include <sys/types.h>
#include <unistd.h>

#include "file.h"

namespace infinity::aio {

enum class Op : std::uint8_t { read, write };

// Demand reads, which a thread waits for, are served first. Prefetches and write-backs take turns after them.
enum class Priority : std::uint8_t { demand, prefetch, write_back };
constexpr int kPriorities = 3;

// The result of a request. `error` is 0 or an errno; `offset` is then the position of the error in the file.
struct Outcome {
    std::size_t nbytes = 0;
    int error = 0;
    std::uint64_t offset = 0;
};

// Linux's steady clock is CLOCK_MONOTONIC, which Python's time.perf_counter() reads too.
using Clock = std::chrono::steady_clock;

// The times at which a request was submitted, its first block was passed to the kernel, and its last block ended.
struct Times {
    Clock::time_point submitted;
    Clock::time_point started;
    Clock::time_point finished;
};

// Blocks of one size at any offsets of a file, which a request moves instead of one range. The engine submits and reaps
// many small blocks of one request without a future, a wake-up or Python code for each of them.
struct Scatter {
    std::vector<std::uint64_t> offsets; // in the order in which they begin
    std::size_t block_nbytes = 0;

    std::size_t nbytes() const { return offsets.size() * block_nbytes; }
};

// The part of a request that becomes its next block.
struct Part {
    std::uint64_t offset = 0;
    std::uintptr_t address = 0;
    std::size_t nbytes = 0;
};

// [Note: who keeps the buffer alive]
// The kernel may write into a request's buffer until the last block has completed, even if the future is dropped
// before. So the engine keeps the request until then, and the request keeps its `Owner` and its file. It drops both at
// completion: a future that is kept longer holds neither memory nor a descriptor.
class Owner {
  public:
    virtual ~Owner() = default;
};

class Request {
  public:
    Request(Op op, std::shared_ptr<File> file, std::uint64_t offset, std::uintptr_t address, std::size_t nbytes,
            std::size_t memory_nbytes, Priority priority, std::unique_ptr<Owner> owner)
        : op(op), offset(offset), address(address), nbytes(nbytes), memory_nbytes(memory_nbytes), priority_(priority),
          file_(std::move(file)), owner_(std::move(owner)) {}

    // A request of scattered blocks. The memory is a multiple of their size.
    Request(Op op, std::shared_ptr<File> file, Scatter scatter, std::uintptr_t address, std::size_t memory_nbytes,
            Priority priority, std::unique_ptr<Owner> owner)
        : op(op), address(address), nbytes(scatter.nbytes()), memory_nbytes(memory_nbytes), priority_(priority),
          scatter_(std::move(scatter)), file_(std::move(file)), owner_(std::move(owner)) {}

    const Op op;
    const std::uint64_t offset = 0; // unused for scattered blocks
    const std::uintptr_t address;
    const std::size_t nbytes;
    const std::size_t memory_nbytes; // size of the memory at `address`; if less than `nbytes`, it is used repeatedly

    // Valid until the request is done.
    const std::shared_ptr<File>& file() const { return file_; }

    bool done() const { return done_.load(std::memory_order_acquire); }

    // Whether the request can never end, because this is a forked child without the engine's threads.
    bool orphaned() const { return !done() && getpid() != process_; }

    // Blocks until the request is done, at most `timeout_s` seconds if that is not negative; false on timeout.
    bool wait(double timeout_s);

    // Valid once the request is done.
    Outcome outcome() const { return outcome_; }
    Times times() const { return times_; }

  private:
    friend class BlockQueue;

    void complete();

    // Returns the part after the first `cut_` bytes: at most `most_nbytes` of a range, or one scattered block.
    Part next(std::size_t most_nbytes) const;

    // Guarded by the queue's mutex.
    Priority priority_;
    std::size_t cut_ = 0; // bytes that were cut into blocks so far
    int in_flight_ = 0;
    Outcome outcome_;
    Times times_{Clock::now(), {}, {}};

    const Scatter scatter_; // has no offsets if the request is for one range
    std::shared_ptr<File> file_;
    std::unique_ptr<Owner> owner_;
    const pid_t process_ = getpid();
    std::atomic<bool> done_{false};
    std::mutex mutex_;
    std::condition_variable changed_;
};

// A piece of a request that is one system call, or several if transfers are short.
struct Block {
    std::shared_ptr<Request> request;
    Priority priority = Priority::demand; // of the request when the block was cut
    std::uint64_t offset = 0;
    std::uintptr_t address = 0;
    std::size_t nbytes = 0;
    std::size_t moved = 0;
    int retries = 0;
    Clock::time_point started{}; // time at which it was taken from the queue
};

} // namespace infinity::aio
