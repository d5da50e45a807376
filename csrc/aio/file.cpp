#include "file.h"

#include <algorithm>
#include <cerrno>
#include <system_error>

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

namespace infinity::aio {

namespace {

constexpr std::size_t kFallbackAlignment = 4096;

// Returns the alignment of direct I/O that the filesystem reports (Linux 6.1); 4096 if it reports none.
std::size_t direct_alignment([[maybe_unused]] int fd) {
#ifdef STATX_DIOALIGN
    struct statx stx{};
    if (statx(fd, "", AT_EMPTY_PATH, STATX_DIOALIGN, &stx) == 0 && (stx.stx_mask & STATX_DIOALIGN) != 0 &&
        stx.stx_dio_offset_align != 0) {
        return std::max<std::size_t>(stx.stx_dio_mem_align, stx.stx_dio_offset_align);
    }
#endif
    return kFallbackAlignment;
}

} // namespace

File::File(const std::string& path, bool read_only, bool direct) {
    const int flags = (read_only ? O_RDONLY : O_RDWR) | O_CLOEXEC;
    fd_ = ::open(path.c_str(), direct ? flags | O_DIRECT : flags);
    direct_ = direct && fd_ >= 0;
    if (fd_ < 0 && direct && errno == EINVAL) { // the filesystem has no direct I/O
        fd_ = ::open(path.c_str(), flags);
    }
    if (fd_ < 0) {
        throw std::system_error(errno, std::generic_category(), path);
    }
    alignment_ = direct_ ? direct_alignment(fd_) : 1;
}

File::~File() {
    ::close(fd_);
}

} // namespace infinity::aio
