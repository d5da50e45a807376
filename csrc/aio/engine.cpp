#include "engine.h"

#include <cerrno>
#include <chrono>
#include <stdexcept>
#include <thread>
#include <utility>

#include <unistd.h>

namespace infinity::aio {

namespace {
constexpr int kMaxRetries = 1000;   // for one block without progress
constexpr int kMaxRetriesAtEnd = 8; // for a transfer that ends before the next aligned position
constexpr std::chrono::microseconds kRetryPause{200};
} // namespace

int Faults::next() {
    if (plan_.error == 0 && plan_.interrupt_every == 0 && plan_.again_every == 0) {
        return 0;
    }
    const long call = ++calls_;
    if (plan_.error != 0 && call == plan_.error_at) {
        return plan_.error;
    }
    if (plan_.interrupt_every > 0 && call % plan_.interrupt_every == 0) {
        return EINTR;
    }
    if (plan_.again_every > 0 && call % plan_.again_every == 0) {
        return EAGAIN;
    }
    return 0;
}

Engine::Engine(const Options& options)
    : options_(options), faults_(options.faults), queue_(options.block_nbytes, options.depth), owner_(getpid()) {}

bool Engine::forked() const {
    return getpid() != owner_;
}

void Engine::refuse_in_child() const {
    if (forked()) {
        throw std::logic_error("this I/O engine belongs to the parent process; open one in the child");
    }
}

void Engine::submit(std::shared_ptr<Request> request) {
    refuse_in_child();
    if (queue_.push(std::move(request))) {
        wake();
    }
}

void Engine::promote(const std::shared_ptr<Request>& request) {
    if (!forked() && queue_.promote(request)) {
        wake();
    }
}

Engine::Verdict Engine::judge(Block& block, long result, int& error) {
    if (result == -EINTR || result == -EAGAIN) {
        if (++block.retries > kMaxRetries) {
            error = static_cast<int>(-result);
            return Verdict::failed;
        }
        if (result == -EAGAIN) {
            std::this_thread::sleep_for(kRetryPause);
        }
        return Verdict::again;
    }
    if (result < 0) {
        error = static_cast<int>(-result);
        return Verdict::failed;
    }
    // Direct I/O can continue only at an aligned position: bytes beyond the last one are transferred again.
    const std::size_t alignment = block.request->file()->alignment();
    std::size_t moved = static_cast<std::size_t>(result);
    if (block.moved + moved < block.nbytes) {
        moved -= moved % alignment;
    }
    if (moved == 0) { // probably the end of the file, which may be between two aligned positions
        if (result == 0 || ++block.retries > kMaxRetriesAtEnd) {
            error = block.request->op == Op::read ? ENODATA : EIO;
            return Verdict::failed;
        }
        return Verdict::again;
    }
    block.moved += moved;
    block.retries = 0;
    return block.moved == block.nbytes ? Verdict::finished : Verdict::again;
}

void Engine::finish(const Block& block, int error, bool fixed) {
    auto& bytes = block.request->op == Op::read ? bytes_read_ : bytes_written_;
    bytes.fetch_add(block.moved, std::memory_order_relaxed);
    blocks_.fetch_add(1, std::memory_order_relaxed);
    fixed_blocks_.fetch_add(fixed ? 1 : 0, std::memory_order_relaxed);
    if (error == 0) {
        auto& latencies = block.request->op == Op::read ? read_latencies_ : write_latencies_;
        latencies.add(Clock::now() - block.started);
    }
    queue_.finish(block, error);
}

Stats Engine::stats() const {
    return Stats{bytes_read_, bytes_written_, blocks_, fixed_blocks_};
}

} // namespace infinity::aio
