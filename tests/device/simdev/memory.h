// The device's memory, and the host memory that it copies from and to.
#pragma once

#include <atomic>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <map>
#include <mutex>
#include <vector>

#include <sys/mman.h>
#include <unistd.h>

#include <c10/util/Exception.h>

#include "settings.h"

namespace infinity::simdev {

// One file, mapped twice. Tensors point at the first mapping, which nobody may touch: a host that does dies with
// SIGSEGV, always. Streams work through the second.
class DeviceMemory {
  public:
    DeviceMemory() {
        int file = memfd_create("simdev", MFD_CLOEXEC);
        TORCH_CHECK(file >= 0 && ftruncate(file, kMappedBytes) == 0, "simdev: no memory");
        void* face = mmap(nullptr, kMappedBytes, PROT_NONE, MAP_SHARED, file, 0);
        void* back = mmap(nullptr, kMappedBytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, file, 0);
        TORCH_CHECK(face != MAP_FAILED && back != MAP_FAILED, "simdev: mmap failed");
        close(file);
        face_ = static_cast<char*>(face);
        back_ = static_cast<char*>(back);
    }

    bool holds(const void* address) const { return address >= face_ && address < face_ + kMappedBytes; }
    std::size_t offset_of(const void* address) const { return static_cast<const char*>(address) - face_; }
    char* face(std::size_t offset) const { return face_ + offset; }
    char* back(std::size_t offset) const { return back_ + offset; }

    // Where a stream finds what a tensor points at; host addresses as they are.
    void* behind(const void* address) const {
        return holds(address) ? back(offset_of(address)) : const_cast<void*>(address);
    }

  private:
    char* face_;
    char* back_;
};

inline DeviceMemory& memory() {
    static auto* mapped = new DeviceMemory;
    return *mapped;
}

// Pinned host memory #

enum class Pinning { pageable, allocated, registered };

// Ranges that the device may copy from and to while the host goes on.
class PinnedRanges {
  public:
    void add(void* address, std::size_t nbytes, Pinning how) {
        std::lock_guard lock(mutex_);
        ranges_[static_cast<char*>(address)] = {nbytes, how};
    }

    // The length of the range that is gone.
    std::size_t remove(void* address) {
        std::lock_guard lock(mutex_);
        auto found = ranges_.find(static_cast<char*>(address));
        if (found == ranges_.end())
            return 0;
        std::size_t nbytes = found->second.first;
        ranges_.erase(found);
        return nbytes;
    }

    // How these bytes are pinned; a driver refuses a copy of some that lie in two ranges.
    Pinning at(const void* address, std::size_t nbytes) {
        std::lock_guard lock(mutex_);
        auto begin = static_cast<const char*>(address);
        auto after = ranges_.upper_bound(begin);
        if (after == ranges_.begin())
            return Pinning::pageable;
        auto& [start, range] = *std::prev(after);
        if (begin >= start + range.first)
            return Pinning::pageable;
        TORCH_CHECK(begin + nbytes <= start + range.first, "invalid argument: a copy of ", nbytes,
                    " bytes of host memory leaves what was registered");
        return range.second;
    }

  private:
    std::mutex mutex_;
    std::map<const char*, std::pair<std::size_t, Pinning>> ranges_;
};

inline PinnedRanges& pinned() {
    static auto* ranges = new PinnedRanges;
    return *ranges;
}

// Races between the host and copies #

inline std::atomic<long> races{0};

inline void report_race(const char* what, std::size_t nbytes) {
    races++;
    std::fprintf(stderr, "simdev: RACE: %s (%zu bytes)\n", what, nbytes);
}

inline std::uint64_t checksum(const void* address, std::size_t nbytes) {
    const auto* bytes = static_cast<const unsigned char*>(address);
    std::uint64_t sum = nbytes;
    for (; nbytes >= 8; nbytes -= 8, bytes += 8) {
        std::uint64_t word;
        std::memcpy(&word, bytes, 8);
        sum = sum * 31 + word;
    }
    for (; nbytes; nbytes--)
        sum = sum * 31 + *bytes++;
    return sum;
}

// Host memory of copies that are queued and not done.
class PendingCopies {
  public:
    struct Range {
        const char* begin;
        std::size_t nbytes;
        bool written; // by the copy
    };

    void add(const Range& range) {
        std::lock_guard lock(mutex_);
        ranges_.push_back(range);
    }

    void remove(const Range& range) {
        std::lock_guard lock(mutex_);
        for (auto at = ranges_.begin(); at != ranges_.end(); ++at)
            if (at->begin == range.begin && at->nbytes == range.nbytes && at->written == range.written) {
                ranges_.erase(at);
                return;
            }
    }

    bool touch(const void* address, std::size_t nbytes, bool written_only = false) {
        const auto* begin = static_cast<const char*>(address);
        std::lock_guard lock(mutex_);
        for (auto& range : ranges_)
            if (range.begin < begin + nbytes && begin < range.begin + range.nbytes && (range.written || !written_only))
                return true;
        return false;
    }

  private:
    std::mutex mutex_;
    std::vector<Range> ranges_;
};

inline PendingCopies& pending_copies() {
    static auto* copies = new PendingCopies;
    return *copies;
}

} // namespace infinity::simdev
