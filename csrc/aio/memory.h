// Address ranges that are reserved once, and have physical pages only while these are needed.
#pragma once

#include <cstddef>
#include <cstdint>

namespace infinity::aio {

// An anonymous mapping, unmapped by its destructor. It belongs to the process that made it: a forked child has no
// memory at these addresses (so that no page is copied when one of the two processes writes), and its calls do nothing.
class Mapping {
  public:
    // Maps `nbytes`, rounded up to whole pages, aligned to `alignment` (a power of two of at least a page).
    // Throws std::system_error. The pages are zero, and take memory when they are first touched.
    Mapping(std::size_t nbytes, std::size_t alignment);
    ~Mapping();
    Mapping(const Mapping&) = delete;
    Mapping& operator=(const Mapping&) = delete;

    std::uintptr_t address() const { return address_; }
    std::size_t nbytes() const { return nbytes_; }

    // Makes the range readable and writable, with huge pages if the system has them.
    void open();

    // Frees the physical pages and forbids access: a stale pointer faults instead of reading other bytes.
    void shut();

    // Forbids access as `shut` does, but keeps the physical pages, for the next `open` or for another's `open_with`.
    void park();

    // Opens with the pages (and so the content) of a parked mapping of the same size, because the system would have to
    // zero new pages. The other mapping is then shut.
    void open_with(Mapping& parked);

  private:
    bool is_ours() const;
    void forbid();

    int owner_ = 0;
    std::uintptr_t base_ = 0;
    std::size_t base_nbytes_ = 0;
    std::uintptr_t address_ = 0;
    std::size_t nbytes_ = 0;
};

} // namespace infinity::aio
