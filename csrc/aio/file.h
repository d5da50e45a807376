// An open file: its descriptor, and the alignment that direct I/O needs.
#pragma once

#include <cstddef>
#include <string>

namespace infinity::aio {

// Owns a descriptor. There is no `close`: the descriptor is closed with the last request that uses it. If it were
// closed earlier, its number could already be that of another file.
class File {
  public:
    // Opens an existing file, with O_DIRECT if `direct` is true and the filesystem has it. Throws std::system_error.
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
