// The interface that both engines implement, and what they share.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <sys/types.h>

#include "faults.h"
#include "latency.h"
#include "queue.h"
#include "request.h"

namespace infinity::aio {

struct Options {
    std::size_t block_nbytes = 1 << 20;
    int depth = 32;
    int threads = 8; // number of threads of the thread engine
    bool sqpoll = false;
    bool iopoll = false;
    Faults::Plan faults;
};

struct Stats {
    std::uint64_t bytes_read = 0;
    std::uint64_t bytes_written = 0;
    std::uint64_t blocks = 0;
    std::uint64_t fixed_blocks = 0; // blocks that used a registered buffer
};

class Engine {
  public:
    explicit Engine(const Options& options);
    virtual ~Engine() = default;
    Engine(const Engine&) = delete;
    Engine& operator=(const Engine&) = delete;

    // Whether this process is a forked child, which has none of the engine's threads.
    bool forked() const;

    // Throws std::logic_error in a forked child.
    void refuse_in_child() const;

    // Queues a request. Throws std::logic_error when closed, or in a forked child.
    void submit(std::shared_ptr<Request> request);

    // Gives a read that a thread waits for priority over all reads that no thread waits for.
    void promote(const std::shared_ptr<Request>& request);

    // Registers a buffer with the kernel. Returns 0, or an errno if the kernel refuses. The memory must stay mapped
    // until the engine is closed: the kernel continues to use these pages for this address.
    virtual int register_buffer(std::uintptr_t address, std::size_t nbytes) = 0;

    // Unregisters files that have no other owner.
    virtual void release_files() {}

    // Finishes everything that was submitted, then stops.
    virtual void close() = 0;

    Stats stats() const;

    // The latencies of the blocks that ended without an error.
    Latencies::Counts latencies(Op op) const { return (op == Op::read ? read_latencies_ : write_latencies_).counts(); }

  protected:
    // Evaluates the result of a block's system call (bytes, or a negative errno).
    enum class Verdict { finished, failed, again };
    Verdict judge(Block& block, long result, int& error);

    // Accounts for a block and completes it.
    void finish(const Block& block, int error, bool fixed);

    virtual void wake() {}

    const Options options_;
    Faults faults_;
    BlockQueue queue_;

  private:
    const pid_t owner_;
    std::atomic<std::uint64_t> bytes_read_{0};
    std::atomic<std::uint64_t> bytes_written_{0};
    std::atomic<std::uint64_t> blocks_{0};
    std::atomic<std::uint64_t> fixed_blocks_{0};
    Latencies read_latencies_;
    Latencies write_latencies_;
};

std::unique_ptr<Engine> make_thread_engine(const Options& options);

// Throws std::system_error if the kernel refuses.
std::unique_ptr<Engine> make_uring_engine(const Options& options);

// Whether this was built with liburing.
bool has_uring();

} // namespace infinity::aio
