// An accelerator that exists only in host memory, as torch's PrivateUse1 device.
//
// Training on it is training on a device with memory, streams and a link of its own, on a machine that has none. What
// synchronisation is missing shows: see memory.h (addresses), streams.h (order and time), allocator.h (reuse),
// kernels.h (values, races of copies). No Python headers: device.py calls the functions at the end of this file.
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/set_cpu_dispatch.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_native.h>
#include <torch/library.h>

#include "kernels.h"

namespace infinity::simdev {

// Operators that make and view memory; all others go to `run_operator` #

static at::Scalar local_scalar(const Tensor& self) {
    wait_on_host(current_stream);
    return behind(self).item();
}

static Tensor empty(c10::IntArrayRef size, std::optional<c10::ScalarType> dtype, std::optional<c10::Layout>,
                    std::optional<c10::Device>, std::optional<bool>, std::optional<c10::MemoryFormat> format) {
    return at::detail::empty_generic(size, &allocator(), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
                                     c10::dtype_or_default(dtype), format);
}

static Tensor empty_strided(c10::IntArrayRef size, c10::IntArrayRef stride, std::optional<c10::ScalarType> dtype,
                            std::optional<c10::Layout>, std::optional<c10::Device>, std::optional<bool>) {
    return at::detail::empty_strided_generic(
        size, stride, &allocator(), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1), c10::dtype_or_default(dtype));
}

static const Tensor& resize(const Tensor& self, c10::IntArrayRef size, std::optional<at::MemoryFormat>) {
    self.unsafeGetTensorImpl()->set_sizes_contiguous(size);
    std::size_t needed = (self.storage_offset() + self.numel()) * self.itemsize();
    if (needed > self.storage().nbytes())
        at::detail::getPrivateUse1Hooks().resizePrivateUse1Bytes(self.storage(), needed);
    return self;
}

static Tensor as_strided(const Tensor& self, c10::IntArrayRef size, c10::IntArrayRef stride,
                         std::optional<std::int64_t> offset) {
    return at::native::as_strided_tensorimpl(self, size, stride, offset);
}

static Tensor& set_storage(Tensor& self, at::Storage storage) {
    return at::native::set_(self, storage);
}

static Tensor& set_storage_at(Tensor& self, at::Storage storage, std::int64_t offset, c10::IntArrayRef size,
                              c10::IntArrayRef stride) {
    return at::cpu::set_(self, storage, offset, size, stride);
}

static Tensor& set_tensor(Tensor& self, const Tensor& source) {
    return at::native::set_tensor_(self, source);
}

static bool has_compatible_type(const Tensor&, const Tensor&) {
    return true;
}

static void record_stream(Tensor& self, c10::Stream user) {
    allocator().recordStream(self.storage().data_ptr(), user);
}

static Tensor copy_from_and_resize(const Tensor& source, const Tensor& target) {
    target.resize_(source.sizes());
    return copy_from(source, target, false);
}

// Registration #

static const bool kRegistered = [] {
    c10::SetAllocator(c10::kPrivateUse1, &allocator());
    at::RegisterPrivateUse1HooksInterface(new Hooks);
    return true;
}();

REGISTER_HOST_ALLOCATOR(at::kPrivateUse1, &host_allocator)
C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard)

TORCH_LIBRARY_IMPL(aten, PrivateUse1, library) {
    library.impl("empty.memory_format", empty);
    library.impl("empty_strided", empty_strided);
    library.impl("as_strided", as_strided);
    library.impl("resize_", resize);
    library.impl("_reshape_alias", TORCH_FN(at::native::_reshape_alias));
    library.impl("view", TORCH_FN(at::native::view));
    library.impl("unfold", TORCH_FN(at::native::unfold));
    library.impl("_copy_from", copy_from);
    library.impl("_copy_from_and_resize", copy_from_and_resize);
    library.impl("_local_scalar_dense", local_scalar);
    library.impl("set_.source_Tensor", set_tensor);
    library.impl("set_.source_Storage", set_storage);
    library.impl("set_.source_Storage_storage_offset", set_storage_at);
    library.impl("_has_compatible_shallow_copy_type", has_compatible_type);
    library.impl("record_stream", record_stream);
    // What the CPU has a kernel for runs that kernel, even where torch could compose it of others that round otherwise.
    for (const auto& name : c10::Dispatcher::singleton().getAllOpNames()) {
        auto op = c10::Dispatcher::singleton().findOp(name);
        bool is_composite = op && (op->hasKernelForDispatchKey(c10::DispatchKey::CompositeImplicitAutograd) ||
                                   op->hasKernelForDispatchKey(c10::DispatchKey::CompositeExplicitAutograd));
        if (is_composite && name.getNamespace() == "aten" && op->hasKernelForDispatchKey(c10::DispatchKey::CPU) &&
            !op->hasKernelForDispatchKey(c10::DispatchKey::PrivateUse1))
            library.impl(c10::toString(name).c_str(), torch::CppFunction::makeFromBoxedFunction<&run_operator>());
    }
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, library) {
    library.fallback(torch::CppFunction::makeFromBoxedFunction<&run_operator>());
}

} // namespace infinity::simdev

// For Python #

using namespace infinity::simdev;

#define SIMDEV_API __attribute__((visibility("default")))

extern "C" {

// False if there is no such setting.
SIMDEV_API bool simdev_set(const char* name, double value) {
    for (auto& [known, member] : kNames)
        if (std::string(known) == name) {
            settings().*member = value;
            return true;
        }
    return false;
}

SIMDEV_API double simdev_get(const char* name) {
    for (auto& [known, member] : kNames)
        if (std::string(known) == name)
            return settings().*member;
    return -1;
}

// Copies from and to this host memory need not be waited for.
SIMDEV_API void simdev_register(void* address, std::size_t nbytes) {
    pinned().add(address, nbytes, Pinning::registered);
}

// The memory is about to go, so copies that still use it are a race; they are waited for, to report it and not to
// crash.
SIMDEV_API void simdev_unregister(void* address) {
    std::size_t nbytes = pinned().remove(address);
    if (settings().check && pending_copies().touch(address, nbytes))
        report_race("host memory is given back under a copy", nbytes);
    for (int index = 0; index < kStreams; index++)
        if (streams[index].load())
            mark(index)->wait();
}

SIMDEV_API long simdev_races() {
    return races;
}
// Races that a test has provoked.
SIMDEV_API void simdev_forgive_races(long count) {
    races -= count;
}

SIMDEV_API long simdev_queued() {
    return queued;
}
// How often the host has waited for all that a stream was given; not for single events.
SIMDEV_API long simdev_host_waits() {
    return host_waits;
}
SIMDEV_API long simdev_run_at_once() {
    return run_at_once;
}

SIMDEV_API double simdev_busy_s(int engine) {
    std::lock_guard lock(engines[engine].mutex);
    return engines[engine].busy_s;
}

// A Chrome trace of what ran while `trace` was set. False if the file cannot be written.
SIMDEV_API bool simdev_write_trace(const char* path) {
    std::lock_guard lock(trace_mutex);
    std::FILE* file = std::fopen(path, "w");
    if (!file)
        return false;
    const char* separator = "[";
    for (auto& span : trace) {
        std::fprintf(file, "%s\n{\"name\":\"%s\",\"ph\":\"X\",\"pid\":0,\"tid\":\"%s\",\"ts\":%.1f,\"dur\":%.1f}",
                     separator, span.name.c_str(), kEngineNames[span.engine], span.start_s * 1e6,
                     (span.end_s - span.start_s) * 1e6);
        separator = ",";
    }
    std::fprintf(file, "%s\n]\n", trace.empty() ? "[" : "");
    return std::fclose(file) == 0;
}
}
