// Streams: a thread and a queue each. What is queued really runs later, in the order of its stream.
//
// Beside the real clock, the device keeps one of its own, so that durations add up as they would on hardware: there is
// one engine for kernels and one for each direction of the link, and a task begins when its stream, its engine and the
// host that issued it have got that far.
#pragma once

#include <algorithm>
#include <array>
#include <chrono>
#include <condition_variable>
#include <deque>
#include <functional>
#include <memory>
#include <string>
#include <thread>

#include <ATen/core/LegacyTypeDispatch.h>

#include "memory.h"

namespace infinity::simdev {

inline double now() {
    return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

inline void sleep_until(double at_s) {
    double left_s = at_s - now();
    if (left_s > 0)
        std::this_thread::sleep_for(std::chrono::duration<double>(left_s));
}

// A point in a stream.
class Mark {
  public:
    void reach(double at_s) {
        {
            std::lock_guard lock(mutex_);
            reached_ = true;
            at_s_ = at_s;
        }
        changed_.notify_all();
    }

    bool query() {
        std::lock_guard lock(mutex_);
        return reached_;
    }

    // Blocks until the stream is there; when that was, on the device's clock.
    double wait() {
        std::unique_lock lock(mutex_);
        changed_.wait(lock, [&] { return reached_; });
        return at_s_;
    }

  private:
    std::mutex mutex_;
    std::condition_variable changed_;
    bool reached_ = false;
    double at_s_ = 0;
};
using MarkPtr = std::shared_ptr<Mark>;

enum Engine { kCompute = 0, kUp = 1, kDown = 2, kNone = 3 };
inline constexpr const char* kEngineNames[] = {"compute", "h2d", "d2h", "none"};

struct EngineState {
    std::mutex mutex;
    double free_at_s = 0;
    double busy_s = 0;
};
inline EngineState engines[4];

struct Span {
    int engine;
    double start_s, end_s;
    std::string name;
};
inline std::mutex trace_mutex;
inline std::vector<Span> trace;

inline void keep_span(int engine, double start_s, double end_s, const std::string& name) {
    if (!settings().trace || engine == kNone)
        return;
    std::lock_guard lock(trace_mutex);
    trace.push_back({engine, start_s, end_s, name});
}

// Failed kernels #

// A kernel that fails is noticed by whoever asks the device next, as on hardware.
inline std::mutex error_mutex;
inline std::string first_error;

inline void keep_error(const std::string& error) {
    std::lock_guard lock(error_mutex);
    if (first_error.empty())
        first_error = error;
}

inline void raise_error() {
    std::string error;
    {
        std::lock_guard lock(error_mutex);
        error.swap(first_error);
    }
    TORCH_CHECK(error.empty(), "simdev: an earlier kernel failed: ", error);
}

// Queues #

struct Task {
    enum class Kind { run, wait, reach } kind = Kind::run;
    std::string name;
    Engine engine = kNone;
    double seconds = 0;
    bool late = false; // runs at the end of its time, and not at the beginning
    std::function<void()> run;
    MarkPtr mark;
    double issued_s = 0;
};

class Stream {
  public:
    Stream() {
        std::thread([this] { work(); }).detach(); // streams live as long as the process
    }

    void push(Task task) {
        task.issued_s = now();
        left_++;
        {
            std::lock_guard lock(mutex_);
            tasks_.push_back(std::move(task));
        }
        changed_.notify_one();
    }

    bool idle() const { return left_ == 0; }

  private:
    void work() {
        at::AutoDispatchBelowADInplaceOrView below_autograd;
        for (;;) {
            Task task = next();
            if (task.kind == Task::Kind::wait) {
                clock_s_ = std::max(clock_s_, task.mark->wait());
            } else if (task.kind == Task::Kind::reach) {
                clock_s_ = std::max(clock_s_, task.issued_s);
                sleep_until(clock_s_);
            } else {
                run(task);
            }
            task.run = nullptr; // what it holds is freed before the stream counts as idle
            left_--;
            if (task.kind == Task::Kind::reach)
                task.mark->reach(clock_s_);
        }
    }

    Task next() {
        std::unique_lock lock(mutex_);
        changed_.wait(lock, [&] { return !tasks_.empty(); });
        Task task = std::move(tasks_.front());
        tasks_.pop_front();
        return task;
    }

    void run(Task& task) {
        auto& engine = engines[task.engine];
        double start_s, end_s;
        {
            std::lock_guard lock(engine.mutex);
            start_s = std::max({clock_s_, task.issued_s, engine.free_at_s});
            end_s = start_s + task.seconds;
            engine.free_at_s = end_s;
        }
        if (task.late)
            sleep_until(end_s);
        try {
            task.run();
        } catch (const c10::Error& error) {
            keep_error(task.name + ": " + error.what_without_backtrace());
        } catch (const std::exception& error) {
            keep_error(task.name + ": " + error.what());
        }
        // What computes takes at least as long as it takes; what is hollow keeps to the model.
        if (!(settings().hollow && task.seconds > 0))
            end_s = std::max(end_s, now());
        clock_s_ = end_s;
        {
            std::lock_guard lock(engine.mutex);
            engine.free_at_s = std::max(engine.free_at_s, end_s);
            engine.busy_s += end_s - start_s;
        }
        keep_span(task.engine, start_s, end_s, task.name);
        if (end_s - now() > 1e-4) // shorter sleeps cost more than they model; the next task makes up for them
            sleep_until(end_s);
    }

    std::mutex mutex_;
    std::condition_variable changed_;
    std::deque<Task> tasks_;
    std::atomic<long> left_{0};
    double clock_s_ = 0; // the device's time up to which this stream has got
};

constexpr int kStreams = 8;
inline std::array<std::atomic<Stream*>, kStreams> streams{};
inline std::atomic<unsigned> streams_made{0};
inline thread_local int current_stream = 0;
inline std::atomic<long> queued{0};

inline Stream& stream(int index) {
    static auto* mutex = new std::mutex;
    Stream* found = streams[index].load();
    if (!found) {
        std::lock_guard lock(*mutex);
        found = streams[index].load();
        if (!found)
            streams[index].store(found = new Stream);
    }
    return *found;
}

inline MarkPtr mark(int index) {
    Task task;
    task.kind = Task::Kind::reach;
    task.mark = std::make_shared<Mark>();
    MarkPtr made = task.mark;
    stream(index).push(std::move(task));
    return made;
}

inline void wait_for(int index, MarkPtr mark) {
    Task task;
    task.kind = Task::Kind::wait;
    task.mark = std::move(mark);
    stream(index).push(std::move(task));
}

// Blocks until all that this stream was given is done.
inline void drain(int index) {
    mark(index)->wait();
    raise_error();
}

inline void drain_all() {
    for (int index = 0; index < kStreams; index++)
        if (streams[index].load())
            mark(index)->wait();
    raise_error();
}

// As `drain`, where a host program asks for it.
inline std::atomic<long> host_waits{0};
inline void wait_on_host(int index) {
    host_waits++;
    drain(index);
}

// Queues on the caller's current stream.
inline void launch(Engine engine, double seconds, std::string name, std::function<void()> run, bool late = false) {
    raise_error();
    Task task;
    task.name = std::move(name);
    task.engine = engine;
    task.seconds = seconds;
    task.late = late;
    task.run = std::move(run);
    stream(current_stream).push(std::move(task));
    queued++;
    if (settings().sync)
        drain(current_stream);
}

} // namespace infinity::simdev
