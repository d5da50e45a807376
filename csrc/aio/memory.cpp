#include "memory.h"

#include <algorithm>
#include <cerrno>
#include <system_error>

#include <sys/mman.h>
#include <unistd.h>

#ifndef MREMAP_DONTUNMAP
#define MREMAP_DONTUNMAP 4 // as in linux/mman.h; glibc before 2.32 does not define it
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
    if (nbytes_ < nbytes || base_nbytes_ < nbytes_) { // overflow: larger than the address space
        throw std::system_error(ENOMEM, std::generic_category(), "mmap");
    }
    void* base = mmap(nullptr, base_nbytes_, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (base == MAP_FAILED) {
        fail("mmap");
    }
    // Without this, every page that is written while a forked child (of a data loader) lives would be copied. A kernel
    // that refuses this works, too, but makes the copies.
    (void)madvise(base, base_nbytes_, MADV_DONTFORK);
    base_ = reinterpret_cast<std::uintptr_t>(base);
    address_ = (base_ + alignment - 1) / alignment * alignment;
}

Mapping::~Mapping() {
    if (is_ours()) {
        munmap(pointer(base_), base_nbytes_);
    }
}

// In a forked child, other memory may be mapped at these addresses.
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
    // A refusal is no error: without huge pages there are only more page faults.
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
    // The range that the pages leave stays reserved (MREMAP_DONTUNMAP, Linux 5.7): its addresses are not reused.
    const int flags = MREMAP_MAYMOVE | MREMAP_FIXED | MREMAP_DONTUNMAP;
    void* moved = mremap(pointer(parked.address_), nbytes_, nbytes_, flags, pointer(address_));
    if (moved == MAP_FAILED) {
        // The failed call may have unmapped the range: reserve it again.
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
