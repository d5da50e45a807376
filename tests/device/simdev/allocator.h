// Device memory is handed out in stream order, as CUDA's caching allocator does.
//
// A block that is freed may be used again at once by work of the stream that it was allocated on; other streams wait
// for that one first. Work of another stream that still uses it is not waited for, unless `record_stream` said so: it
// finds poison.
#pragma once

#include <ATen/core/CachingHostAllocator.h>
#include <c10/core/CachingDeviceAllocator.h>

#include <cstdlib>
#include <set>
#include <unordered_map>

#include "streams.h"

namespace infinity::simdev {

inline const c10::Device kDevice(c10::kPrivateUse1, 0);

class DeviceAllocator final : public c10::DeviceAllocator {
  public:
    DeviceAllocator() { free_[0] = {kMappedBytes, kNobody, nullptr}; }

    at::DataPtr allocate(std::size_t nbytes) override {
        if (!nbytes)
            return {nullptr, nullptr, &release, kDevice};
        std::size_t size = (nbytes + kAlign - 1) / kAlign * kAlign;
        std::size_t offset = 0;
        std::lock_guard lock(mutex_);
        settle();
        if (!take(size, offset)) {
            wait_for_frees();
            if (!take(size, offset)) {
                stats_.num_ooms++;
                TORCH_CHECK_WITH(OutOfMemoryError, false, "simdev out of memory: ", nbytes, " bytes asked for, ",
                                 used_bytes(), " of ", capacity(), " in use");
            }
        }
        if (offset + size > touched_) { // memory that nobody has had yet is no more zero than other memory
            poison(current_stream, std::max(offset, touched_), offset + size);
            touched_ = offset + size;
        }
        used_[offset] = {size, current_stream, {}};
        stats_.allocated_bytes[0].increase(size);
        stats_.reserved_bytes[0].increase(size);
        stats_.num_device_alloc++;
        void* face = memory().face(offset);
        return {face, face, &release, kDevice};
    }

    void free(void* address) {
        std::lock_guard lock(mutex_);
        auto found = used_.find(memory().offset_of(address));
        TORCH_INTERNAL_ASSERT(found != used_.end());
        Leaving leaving{found->first, found->second, {}};
        used_.erase(found);
        stats_.allocated_bytes[0].decrease(leaving.used.size);
        stats_.reserved_bytes[0].decrease(leaving.used.size);
        stats_.num_device_free++;
        for (int other : leaving.used.others)
            leaving.marks.push_back(mark(other));
        leaving_.push_back(std::move(leaving));
        settle();
    }

    void recordStream(const c10::DataPtr& data, c10::Stream user) override {
        if (!data.get())
            return;
        std::lock_guard lock(mutex_);
        auto found = used_.find(memory().offset_of(data.get()));
        if (found != used_.end() && found->second.stream != user.id())
            found->second.others.insert(static_cast<int>(user.id()));
    }

    void copy_data(void* target, const void* source, std::size_t nbytes) const override {
        void *to = memory().behind(target), *from = memory().behind(source);
        launch(kCompute, 0, "copy_data", [=] { std::memcpy(to, from, nbytes); });
    }

    std::pair<std::size_t, std::size_t> getMemoryInfo(c10::DeviceIndex) override {
        std::lock_guard lock(mutex_);
        return {capacity() - std::min(capacity(), used_bytes()), capacity()};
    }

    c10::CachingDeviceAllocator::DeviceStats getDeviceStats(c10::DeviceIndex) override {
        std::lock_guard lock(mutex_);
        return stats_;
    }

    void resetAccumulatedStats(c10::DeviceIndex) override {
        std::lock_guard lock(mutex_);
        stats_.allocated_bytes[0].reset_accumulated();
    }

    void resetPeakStats(c10::DeviceIndex) override {
        std::lock_guard lock(mutex_);
        stats_.allocated_bytes[0].reset_peak();
        stats_.reserved_bytes[0].reset_peak();
    }

    at::DeleterFnPtr raw_deleter() const override { return &release; }
    bool initialized() override { return true; }
    void emptyCache(c10::MempoolId_t = {0, 0}) override {}

  private:
    static constexpr std::size_t kAlign = 512;
    static constexpr int kNobody = -1; // no stream has work left that uses the block

    struct Free {
        std::size_t size;
        int owner;     // the stream that it was freed on
        MarkPtr freed; // where in that stream
    };
    struct Used {
        std::size_t size;
        int stream;
        std::set<int> others; // streams that use it too
    };
    struct Leaving {
        std::size_t offset;
        Used used;
        std::vector<MarkPtr> marks; // that the other streams have to get to
    };

    static void release(void* address);

    std::size_t capacity() const { return static_cast<std::size_t>(settings().capacity); }
    std::size_t used_bytes() const { return stats_.allocated_bytes[0].current; }

    bool take(std::size_t size, std::size_t& offset) {
        if (used_bytes() + size > capacity())
            return false;
        auto best = smallest_hole(size, /*of_this_stream=*/true);
        if (best == free_.end())
            best = smallest_hole(size, /*of_this_stream=*/false);
        if (best == free_.end())
            return false;
        offset = best->first;
        Free hole = best->second;
        free_.erase(best);
        if (hole.owner != kNobody && hole.owner != current_stream)
            wait_for(current_stream, hole.freed);
        if (hole.size > size)
            free_[offset + size] = {hole.size - size, hole.owner, hole.freed};
        return true;
    }

    std::map<std::size_t, Free>::iterator smallest_hole(std::size_t size, bool of_this_stream) {
        auto best = free_.end();
        for (auto at = free_.begin(); at != free_.end(); ++at) {
            bool fits = at->second.size >= size;
            bool usable = !of_this_stream || at->second.owner == current_stream || at->second.owner == kNobody;
            if (fits && usable && (best == free_.end() || at->second.size < best->second.size))
                best = at;
        }
        return best;
    }

    // Memory whose other users are done goes back to the stream that it was allocated on.
    void settle() {
        std::vector<Leaving> stay;
        for (auto& leaving : leaving_) {
            bool done = std::all_of(leaving.marks.begin(), leaving.marks.end(), [](auto& m) { return m->query(); });
            if (done)
                give(leaving.offset, leaving.used);
            else
                stay.push_back(std::move(leaving));
        }
        leaving_ = std::move(stay);
    }

    void give(std::size_t offset, const Used& used) {
        poison(used.stream, offset, offset + used.size);
        insert(offset, {used.size, used.stream, mark(used.stream)});
    }

    // Hollow kernels leave results that the host looks at as they are: zero is a loss, NaN stops training.
    static void poison(int index, std::size_t begin, std::size_t end) {
        if (!settings().poison && !settings().hollow)
            return;
        int byte = settings().hollow ? 0 : 0xff;
        if (settings().hollow)
            end = std::min(end, begin + 4096);
        Task task;
        task.name = "poison";
        task.run = [start = memory().back(begin), byte, nbytes = end - begin] { std::memset(start, byte, nbytes); };
        stream(index).push(std::move(task));
    }

    // Neighbours of one owner become one hole.
    void insert(std::size_t offset, Free hole) {
        auto next = free_.lower_bound(offset);
        if (next != free_.end() && next->first == offset + hole.size && next->second.owner == hole.owner) {
            hole.size += next->second.size;
            next = free_.erase(next);
        }
        if (next != free_.begin()) {
            auto before = std::prev(next);
            if (before->first + before->second.size == offset && before->second.owner == hole.owner) {
                before->second.size += hole.size;
                before->second.freed = hole.freed;
                return;
            }
        }
        free_[offset] = hole;
    }

    void wait_for_frees() {
        for (int index = 0; index < kStreams; index++)
            if (streams[index].load())
                mark(index)->wait();
        settle();
        auto before = std::move(free_);
        free_.clear();
        for (auto& [offset, hole] : before)
            insert(offset, {hole.size, kNobody, nullptr});
    }

    std::mutex mutex_;
    std::map<std::size_t, Free> free_; // by offset
    std::unordered_map<std::size_t, Used> used_;
    std::vector<Leaving> leaving_;
    std::size_t touched_ = 0; // memory below was used before
    c10::CachingDeviceAllocator::DeviceStats stats_;
};

inline DeviceAllocator& allocator() {
    static auto* only = new DeviceAllocator;
    return *only;
}

inline void DeviceAllocator::release(void* address) {
    if (address)
        allocator().free(address);
}

// What `pin_memory` takes.
class HostAllocator final : public at::HostAllocator {
  public:
    at::DataPtr allocate(std::size_t nbytes) override {
        void* address = nullptr;
        if (nbytes) {
            TORCH_CHECK(posix_memalign(&address, 4096, nbytes) == 0, "simdev: no host memory");
            pinned().add(address, nbytes, Pinning::allocated);
        }
        return {address, address, &release, at::Device(at::kCPU)};
    }
    at::DeleterFnPtr raw_deleter() const override { return &release; }
    void copy_data(void* target, const void* source, std::size_t nbytes) const override {
        std::memcpy(target, source, nbytes);
    }
    bool record_event(void*, void*, c10::Stream) override { return true; } // copies keep their tensors alive
    void empty_cache() override {}
    at::HostStats get_stats() override { return {}; }
    void reset_accumulated_stats() override {}
    void reset_peak_stats() override {}

  private:
    static void release(void* address) {
        if (!address)
            return;
        pinned().remove(address);
        std::free(address);
    }
};

inline HostAllocator host_allocator;

} // namespace infinity::simdev
