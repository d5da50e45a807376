// Blocking system calls on a few threads, which work with any file.
#include "engine.h"

#include <algorithm>
#include <cerrno>
#include <thread>
#include <vector>

#include <unistd.h>

namespace infinity::aio {

namespace {

class ThreadEngine final : public Engine {
  public:
    explicit ThreadEngine(const Options& options) : Engine(options) {
        try {
            for (int i = 0; i < options.threads; ++i) {
                threads_.emplace_back([this] { run(); });
            }
        } catch (...) { // the system gives no more threads: end those that run
            close();
            throw;
        }
    }

    ~ThreadEngine() override { close(); }

    int register_buffer(std::uintptr_t, std::size_t) override { return ENOTSUP; }

    void close() override {
        if (forked()) { // the threads exist only in the parent
            return;
        }
        queue_.close();
        for (auto& thread : threads_) {
            thread.join();
        }
        threads_.clear();
    }

  private:
    void run() {
        Block block;
        while (queue_.pop(block)) {
            int error = 0;
            while (judge(block, transfer(block), error) == Verdict::again) {
            }
            finish(block, error, false);
            block.request.reset();
        }
    }

    long transfer(const Block& block) {
        if (const int injected = faults_.next()) {
            return -injected;
        }
        void* const buffer = reinterpret_cast<void*>(block.address + block.moved);
        const std::size_t nbytes = block.nbytes - block.moved;
        const auto offset = static_cast<off_t>(block.offset + block.moved);
        const int fd = block.request->file()->fd();
        const ssize_t result =
            block.request->op == Op::read ? pread(fd, buffer, nbytes, offset) : pwrite(fd, buffer, nbytes, offset);
        return result < 0 ? -errno : faults_.shorten(result);
    }

    std::vector<std::thread> threads_;
};

} // namespace

std::unique_ptr<Engine> make_thread_engine(const Options& options) {
    Options bounded = options; // one block for each thread is in flight; demand reads get a part of this depth
    bounded.depth = std::min(options.depth, options.threads);
    return std::make_unique<ThreadEngine>(bounded);
}

} // namespace infinity::aio
