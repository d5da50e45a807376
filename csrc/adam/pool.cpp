#include "pool.h"

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <mutex>
#include <system_error>
#include <thread>
#include <utility>
#include <vector>

#ifdef __linux__
#include <sched.h>
#endif
#include <unistd.h>
#if defined(__x86_64__)
#include <xmmintrin.h>
#endif

namespace infinity::adam {
namespace {

// Sets default rounding, and no flushing of denormals, while a task runs. The calling thread may have other settings
// (torch's set_flush_denormal changes one thread), and results must not depend on the thread that runs a task.
class DefaultFloatMode {
  public:
#if defined(__x86_64__)
    DefaultFloatMode() : saved_(_mm_getcsr()) { _mm_setcsr(0x1f80); }
    ~DefaultFloatMode() { _mm_setcsr(saved_); }

  private:
    unsigned saved_;
#else
    DefaultFloatMode() {}
    ~DefaultFloatMode() {}
#endif
};

// Binds the calling thread to these CPUs. If the system refuses, it runs on any CPU, with the same results.
void run_on([[maybe_unused]] const std::vector<int>& cpus) {
#ifdef __linux__
    if (cpus.empty())
        return;
    const size_t nbytes = CPU_ALLOC_SIZE(*std::max_element(cpus.begin(), cpus.end()) + 1);
    std::vector<char> memory(nbytes);
    cpu_set_t* set = reinterpret_cast<cpu_set_t*>(memory.data());
    for (int cpu : cpus)
        CPU_SET_S(static_cast<size_t>(cpu), nbytes, set);
    sched_setaffinity(0, nbytes, set);
#endif
}

struct Job {
    size_t count;
    const std::function<void(size_t)>* task;
    std::atomic<size_t> next{0};

    void work() {
        DefaultFloatMode mode;
        for (size_t i; (i = next.fetch_add(1, std::memory_order_relaxed)) < count;)
            (*task)(i);
    }
};

class Pool {
  public:
    // Has fewer threads than `workers` if the system gives no more: results do not depend on their number.
    Pool(int workers, std::vector<int> cpus) : wanted_(workers), cpus_(std::move(cpus)), owner_(getpid()) {
        try {
            for (int i = 0; i < workers; ++i)
                threads_.emplace_back([this] { serve(); });
        } catch (const std::system_error&) {
        }
    }

    ~Pool() {
        {
            std::lock_guard<std::mutex> lock(mutex_);
            stop_ = true;
        }
        wake_.notify_all();
        for (std::thread& thread : threads_)
            thread.join();
    }

    bool is(int workers, const std::vector<int>& cpus) const { return wanted_ == workers && cpus_ == cpus; }
    bool survived_fork() const { return owner_ == getpid(); }

    void run(Job& job) {
        {
            std::lock_guard<std::mutex> lock(mutex_);
            job_ = &job;
            ++generation_;
        }
        wake_.notify_all();
        job.work();
        std::unique_lock<std::mutex> lock(mutex_);
        job_ = nullptr; // a worker that wakes only now finds nothing to do
        idle_.wait(lock, [this] { return busy_ == 0; });
    }

  private:
    void serve() {
        run_on(cpus_);
        size_t seen = 0;
        std::unique_lock<std::mutex> lock(mutex_);
        for (;;) {
            wake_.wait(lock, [&] { return stop_ || (job_ != nullptr && generation_ != seen); });
            if (stop_)
                return;
            seen = generation_;
            Job* job = job_;
            ++busy_;
            lock.unlock();
            job->work();
            lock.lock();
            if (--busy_ == 0)
                idle_.notify_one();
        }
    }

    const int wanted_;
    const std::vector<int> cpus_;
    const pid_t owner_;
    std::mutex mutex_;
    std::condition_variable wake_, idle_;
    Job* job_ = nullptr;
    size_t generation_ = 0;
    int busy_ = 0;
    bool stop_ = false;
    std::vector<std::thread> threads_;
};

int available_cpus() {
#ifdef __linux__
    cpu_set_t set;
    if (sched_getaffinity(0, sizeof set, &set) == 0)
        return std::max(1, CPU_COUNT(&set));
#endif
    return std::max(1u, std::thread::hardware_concurrency());
}

std::atomic<int> wanted_threads{0}; // 0: not set
std::mutex cpus_mutex;
std::vector<int> wanted_cpus; // of the pool's threads; empty for those of the process
std::mutex pool_mutex;        // held by the caller that uses the pool
Pool* pool = nullptr;         // not destroyed at exit, because the order of static destructors is not defined

} // namespace

int thread_count() {
    const int wanted = wanted_threads.load();
    return wanted > 0 ? wanted : available_cpus();
}

void set_thread_count(int count) {
    wanted_threads.store(count);
}

void set_cpus(std::vector<int> cpus) {
    std::lock_guard<std::mutex> lock(cpus_mutex);
    wanted_cpus = std::move(cpus);
}

std::vector<int> cpus() {
    std::lock_guard<std::mutex> lock(cpus_mutex);
    return wanted_cpus;
}

void parallel_for(size_t count, const std::function<void(size_t)>& task) {
    Job job{count, &task};
    const int workers = thread_count() - 1;
    std::unique_lock<std::mutex> lock(pool_mutex, std::defer_lock);
    if (count < 2 || workers < 1 || !lock.try_lock()) {
        job.work();
        return;
    }
    if (pool != nullptr && !pool->survived_fork())
        pool = nullptr; // the parent's threads do not exist here and cannot be joined
    const std::vector<int> on = cpus();
    if (pool == nullptr || !pool->is(workers, on)) {
        delete pool;
        pool = nullptr;
        pool = new Pool(workers, on);
    }
    pool->run(job);
}

} // namespace infinity::adam
