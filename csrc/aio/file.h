// An open file: descriptor, and the alignment that direct I/O asks for.
#pragma once

#include <cstddef>
#include <string>

namespace infinity::aio {

// Owner of a descriptor. There is no `close`: the descriptor goes with the last request that uses it, because a number
// that was closed early could already mean another file.
class File {
  public:
    // Opens an existing file, past the page cache if `direct` and where the filesystem allows it. Throws
    // std::system_error.
    File(const std::string& path, bool read_only, bool direct = true);
    ~File();
    File(const File&) = delete;
    File& operator=(const File&) = delete;

    int fd() const { return fd_; }
    bool direct() const { return direct_; }
    std::size_t alignment() const { return alignment_; }

  private:
    int fd_ = -1;
    bool direct_ = false;
    std::size_t alignment_ = 1;
};

} // namespace infinity::aio
