// What torch asks of a device: streams, events, generators, memory by address.
#pragma once

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include "allocator.h"

namespace infinity::simdev {

struct Event {
    MarkPtr mark;
};

// There is one device, so guards of devices have nothing to do.
class Guard final : public c10::impl::DeviceGuardImplInterface {
  public:
    static constexpr c10::DeviceType static_type = c10::kPrivateUse1;
    Guard() = default;
    explicit Guard(c10::DeviceType) {}

    c10::DeviceType type() const override { return static_type; }
    c10::Device exchangeDevice(c10::Device) const override { return kDevice; }
    c10::Device getDevice() const override { return kDevice; }
    void setDevice(c10::Device) const override {}
    void uncheckedSetDevice(c10::Device) const noexcept override {}
    c10::DeviceIndex deviceCount() const noexcept override { return 1; }
    c10::DeviceCapability getDeviceCapability(c10::Device) const override { return {}; }
    void synchronizeDevice(c10::DeviceIndex) const override {
        host_waits++;
        drain_all();
    }

    c10::Stream getStream(c10::Device) const override { return handle(current_stream); }
    c10::Stream getDefaultStream(c10::Device) const override { return handle(0); }
    c10::Stream getStreamFromGlobalPool(c10::Device device, bool = false) const override {
        return getNewStream(device);
    }
    c10::Stream getNewStream(c10::Device, int = 0) const override {
        return handle(1 + static_cast<int>(streams_made++ % (kStreams - 1)));
    }
    c10::Stream exchangeStream(c10::Stream next) const override {
        return handle(std::exchange(current_stream, index_of(next)));
    }
    bool queryStream(const c10::Stream& asked) const override { return stream(index_of(asked)).idle(); }
    void synchronizeStream(const c10::Stream& asked) const override { wait_on_host(index_of(asked)); }
    void recordDataPtrOnStream(const c10::DataPtr& data, const c10::Stream& user) const override {
        allocator().recordStream(data, user);
    }

    void record(void** event, const c10::Stream& on, const c10::DeviceIndex, const c10::EventFlag) const override {
        if (!*event)
            *event = new Event;
        of(*event).mark = mark(index_of(on));
    }
    void block(void* event, const c10::Stream& waiting) const override {
        if (event)
            wait_for(index_of(waiting), of(event).mark);
    }
    bool queryEvent(void* event) const override { return !event || of(event).mark->query(); }
    void synchronizeEvent(void* event) const override {
        if (!event)
            return;
        of(event).mark->wait();
        raise_error();
    }
    void destroyEvent(void* event, const c10::DeviceIndex) const noexcept override {
        delete static_cast<Event*>(event);
    }
    double elapsedTime(void* start, void* end, const c10::DeviceIndex) const override {
        return (of(end).mark->wait() - of(start).mark->wait()) * 1e3;
    }

  private:
    static Event& of(void* event) { return *static_cast<Event*>(event); }
    static int index_of(const c10::Stream& stream) { return static_cast<int>(stream.id()); }
    static c10::Stream handle(int index) { return c10::Stream(c10::Stream::UNSAFE, kDevice, index); }
};

struct Generator : at::CPUGeneratorImpl {
    Generator() {
        device_ = kDevice;
        key_set_ = c10::DispatchKeySet(c10::DispatchKey::PrivateUse1);
    }
};

class Hooks final : public at::PrivateUse1HooksInterface {
  public:
    bool isBuilt() const override { return true; }
    bool isAvailable() const override { return true; }
    bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
    c10::DeviceIndex deviceCount() const override { return 1; }
    c10::DeviceIndex getCurrentDevice() const override { return 0; }
    void setCurrentDevice(c10::DeviceIndex) const override {}
    c10::DeviceIndex exchangeDevice(c10::DeviceIndex) const override { return 0; }
    c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex) const override { return 0; }
    at::Allocator* getPinnedMemoryAllocator() const override { return &host_allocator; }
    bool isPinnedPtr(const void* address) const override { return pinned().at(address, 1) != Pinning::pageable; }
    at::Device getDeviceFromPtr(void* address) const override {
        TORCH_CHECK(memory().holds(address), "simdev: this is no device memory");
        return kDevice;
    }
    const at::Generator& getDefaultGenerator(c10::DeviceIndex) const override {
        static auto* generator = new at::Generator(at::make_generator<Generator>());
        return *generator;
    }
    at::Generator getNewGenerator(c10::DeviceIndex) const override { return at::make_generator<Generator>(); }

    void resizePrivateUse1Bytes(const c10::Storage& storage, std::size_t nbytes) const override {
        auto* impl = storage.unsafeGetStorageImpl();
        std::size_t kept = std::min(nbytes, impl->nbytes());
        at::DataPtr fresh = allocator().allocate(nbytes);
        if (kept) {
            void *to = memory().behind(fresh.get()), *from = memory().behind(impl->data());
            double seconds = settings().memory_rate ? 2.0 * kept / settings().memory_rate : 0;
            launch(kCompute, seconds, "resize", [=] { std::memcpy(to, from, kept); });
        }
        impl->set_data_ptr_noswap(std::move(fresh));
        impl->set_nbytes(nbytes);
    }
};

} // namespace infinity::simdev
