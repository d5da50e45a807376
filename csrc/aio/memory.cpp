#include "memory.h"

#include <algorithm>
#include <cerrno>
#include <system_error>

#include <sys/mman.h>
#include <unistd.h>

#ifndef MREMAP_DONTUNMAP
#define MREMAP_DONTUNMAP 4 // of linux/mman.h, which C libraries before 2.32 do not pass on
#endif

namespace infinity::aio {

namespace {

[[noreturn]] void fail(const char* what) {
    throw std::system_error(errno, std::generic_category(), what);
}

void* pointer(std::uintptr_t address) {
    return reinterpret_cast<void*>(address);
}

} // namespace

Mapping::Mapping(std::size_t nbytes, std::size_t alignment) : owner_(getpid()) {
    const auto page = static_cast<std::size_t>(sysconf(_SC_PAGESIZE));
    nbytes_ = (std::max<std::size_t>(nbytes, 1) + page - 1) / page * page;
    base_nbytes_ = nbytes_ + alignment;
    if (nbytes_ < nbytes || base_nbytes_ < nbytes_) { // more than there are addresses
        throw std::system_error(ENOMEM, std::generic_category(), "mmap");
    }
    void* base = mmap(nullptr, base_nbytes_, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (base == MAP_FAILED) {
        fail("mmap");
    }
    // A child that a data loader forks would otherwise take a copy of every page that is written while it lives. A
    // kernel without this still works, with those copies.
    (void)madvise(base, base_nbytes_, MADV_DONTFORK);
    base_ = reinterpret_cast<std::uintptr_t>(base);
    address_ = (base_ + alignment - 1) / alignment * alignment;
}

Mapping::~Mapping() {
    if (is_ours()) {
        munmap(pointer(base_), base_nbytes_);
    }
}

// In a child, something else may lie at these addresses by now.
bool Mapping::is_ours() const {
    return getpid() == owner_;
}

void Mapping::open() {
    if (!is_ours()) {
        return;
    }
    if (mprotect(pointer(address_), nbytes_, PROT_READ | PROT_WRITE) != 0) {
        fail("mprotect");
    }
    // Without huge pages everything still works, only with more page faults; so a refusal is no error.
    (void)madvise(pointer(address_), nbytes_, MADV_HUGEPAGE);
}

void Mapping::shut() {
    if (!is_ours()) {
        return;
    }
    if (madvise(pointer(address_), nbytes_, MADV_DONTNEED) != 0) {
        fail("madvise");
    }
    forbid();
}

void Mapping::park() {
    if (is_ours()) {
        forbid();
    }
}

void Mapping::open_with(Mapping& parked) {
    if (!is_ours() || !parked.is_ours()) {
        return;
    }
    if (parked.nbytes_ != nbytes_) {
        throw std::system_error(EINVAL, std::generic_category(), "the other mapping is of another size");
    }
    // The range that the pages leave stays reserved (MREMAP_DONTUNMAP, Linux 5.7): nobody else gets its addresses.
    const int flags = MREMAP_MAYMOVE | MREMAP_FIXED | MREMAP_DONTUNMAP;
    void* moved = mremap(pointer(parked.address_), nbytes_, nbytes_, flags, pointer(address_));
    if (moved == MAP_FAILED) {
        // What was here may be unmapped by now.
        const int fixed = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED;
        if (mmap(pointer(address_), nbytes_, PROT_NONE, fixed, -1, 0) == MAP_FAILED) {
            fail("mmap");
        }
        (void)madvise(pointer(address_), nbytes_, MADV_DONTFORK);
        parked.shut();
    }
    open();
}

void Mapping::forbid() {
    if (mprotect(pointer(address_), nbytes_, PROT_NONE) != 0) {
        fail("mprotect");
    }
}

} // namespace infinity::aio
