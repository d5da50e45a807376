#include "queue.h"

#include <algorithm>
#include <chrono>
#include <stdexcept>
#include <utility>

namespace infinity::aio {

namespace {
constexpr int kDemand = static_cast<int>(Priority::demand);
constexpr int kPrefetch = static_cast<int>(Priority::prefetch);
constexpr int kWriteBack = static_cast<int>(Priority::write_back);
constexpr int kNone = -1;
constexpr std::size_t kWriteBackNbytes = 8 << 20; // in flight without prefetches; at least two blocks
} // namespace

bool Request::wait(double timeout_s) {
    std::unique_lock lock(mutex_);
    const auto is_done = [this] { return done(); };
    if (timeout_s < 0) {
        changed_.wait(lock, is_done);
        return true;
    }
    return changed_.wait_for(lock, std::chrono::duration<double>(timeout_s), is_done);
}

Part Request::next(std::size_t most_nbytes) const {
    const std::size_t at = cut_ % memory_nbytes;
    if (!scatter_.offsets.empty()) { // whole blocks: the memory is a multiple of the block size
        return Part{scatter_.offsets[cut_ / scatter_.block_nbytes], address + at, scatter_.block_nbytes};
    }
    return Part{offset + cut_, address + at, std::min({most_nbytes, nbytes - cut_, memory_nbytes - at})};
}

void Request::complete() {
    owner_.reset();
    file_.reset();
    times_.finished = Clock::now();
    {
        const std::lock_guard lock(mutex_);
        done_.store(true, std::memory_order_release);
    }
    changed_.notify_all();
}

BlockQueue::BlockQueue(std::size_t block_nbytes, int depth)
    : block_nbytes_(block_nbytes), depth_(depth), bulk_depth_(std::max(1, depth - depth / 4)),
      write_back_depth_(std::min(bulk_depth_, std::max(2, static_cast<int>(kWriteBackNbytes / block_nbytes)))) {}

bool BlockQueue::push(std::shared_ptr<Request> request) {
    {
        const std::lock_guard lock(mutex_);
        if (closed_) {
            throw std::logic_error("the I/O engine is closed");
        }
        if (request->nbytes == 0) {
            request->times_.started = request->times_.submitted;
            request->complete();
            return false;
        }
        waiting_[static_cast<int>(request->priority_)].push_back(std::move(request));
        if (choose() == kNone) {
            return false;
        }
    }
    changed_.notify_one();
    return true;
}

bool BlockQueue::promote(const std::shared_ptr<Request>& request) {
    {
        const std::lock_guard lock(mutex_);
        if (request->op != Op::read || request->priority_ == Priority::demand || request->cut_ == request->nbytes) {
            return false;
        }
        auto& line = waiting_[static_cast<int>(request->priority_)];
        line.erase(std::find(line.begin(), line.end(), request));
        request->priority_ = Priority::demand;
        waiting_[kDemand].push_back(request);
        if (choose() == kNone) {
            return false;
        }
    }
    changed_.notify_one();
    return true;
}

int BlockQueue::choose() const {
    if (in_flight_ >= depth_) {
        return kNone;
    }
    if (!waiting_[kDemand].empty()) {
        return kDemand;
    }
    if (bulk_in_flight_ >= bulk_depth_) {
        return kNone;
    }
    const bool reads = !waiting_[kPrefetch].empty();
    const bool beside_reads = reads || bulk_in_flight_ > write_back_in_flight_;
    const int most_writes = beside_reads ? std::max(write_back_depth_, bulk_depth_ / 2) : write_back_depth_;
    const bool writes = !waiting_[kWriteBack].empty() && write_back_in_flight_ < most_writes;
    if (reads && !(writes && last_bulk_ == Priority::prefetch)) {
        return kPrefetch;
    }
    return writes ? kWriteBack : kNone;
}

void BlockQueue::count_in_flight(Priority priority, int change) {
    in_flight_ += change;
    bulk_in_flight_ += priority != Priority::demand ? change : 0;
    write_back_in_flight_ += priority == Priority::write_back ? change : 0;
}

bool BlockQueue::take(Block& block) {
    const int chosen = choose();
    if (chosen == kNone) {
        return false;
    }
    auto& line = waiting_[chosen];
    const auto priority = static_cast<Priority>(chosen);
    const std::shared_ptr<Request> request = line.front();
    const Part part = request->next(block_nbytes_);
    block = Block{request, priority, part.offset, part.address, part.nbytes};
    block.started = Clock::now();
    if (request->cut_ == 0) {
        request->times_.started = block.started;
    }
    request->cut_ += part.nbytes;
    request->in_flight_ += 1;
    if (request->cut_ == request->nbytes) {
        line.pop_front();
    }
    count_in_flight(priority, 1);
    if (priority != Priority::demand) {
        last_bulk_ = priority;
    }
    return true;
}

bool BlockQueue::try_pop(Block& block) {
    const std::lock_guard lock(mutex_);
    return take(block);
}

bool BlockQueue::pop(Block& block) {
    std::unique_lock lock(mutex_);
    for (;;) {
        if (take(block)) {
            if (choose() != kNone) { // `push` wakes one thread, also for a request of many blocks
                changed_.notify_one();
            }
            return true;
        }
        if (closed_ && empty()) {
            return false;
        }
        changed_.wait(lock);
    }
}

void BlockQueue::finish(const Block& block, int error) {
    {
        const std::lock_guard lock(mutex_);
        const auto& request = block.request;
        count_in_flight(block.priority, -1);
        request->in_flight_ -= 1;
        request->outcome_.nbytes += block.moved;
        Outcome& outcome = request->outcome_;
        const auto where = block.offset + block.moved;
        // Blocks begin in order and may end in any order: report the error with the lowest offset.
        if (error != 0 && (outcome.error == 0 || where < outcome.offset)) {
            outcome.error = error;
            outcome.offset = where;
            if (request->cut_ < request->nbytes) { // do not start the rest of a failed request
                auto& line = waiting_[static_cast<int>(request->priority_)];
                line.erase(std::find(line.begin(), line.end(), request));
                request->cut_ = request->nbytes;
            }
        }
        complete_if_over(request);
    }
    changed_.notify_all();
}

void BlockQueue::complete_if_over(const std::shared_ptr<Request>& request) {
    if (request->in_flight_ == 0 && request->cut_ == request->nbytes) {
        request->complete();
    }
}

void BlockQueue::close() {
    {
        const std::lock_guard lock(mutex_);
        closed_ = true;
    }
    changed_.notify_all();
}

bool BlockQueue::drained() const {
    const std::lock_guard lock(mutex_);
    return closed_ && empty() && in_flight_ == 0;
}

bool BlockQueue::empty() const {
    return waiting_[kDemand].empty() && waiting_[kPrefetch].empty() && waiting_[kWriteBack].empty();
}

} // namespace infinity::aio
