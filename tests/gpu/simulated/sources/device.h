// What torch asks of a device: the current one, its streams and events, its generators.
#pragma once

#include "memory.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

namespace sim {
struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override {
    return KIND;
  }
  Device exchangeDevice(Device device) const override {
    Device old(KIND, current);
    setDevice(device);
    return old;
  }
  Device getDevice() const override {
    return Device(KIND, current);
  }
  void setDevice(Device device) const override {
    check_index(device.index());
    current = device.index();
  }
  void uncheckedSetDevice(Device device) const noexcept override {
    current = device.index();
  }
  DeviceIndex deviceCount() const noexcept override {
    return COUNT;
  }
  c10::DeviceCapability getDeviceCapability(Device) const override {
    return {};
  }

  Stream getStream(Device device) const override {
    auto index = or_current(device);
    return stream_of(index, current_ids[index]);
  }
  Stream getDefaultStream(Device device) const override {
    return stream_of(or_current(device), 0);
  }
  Stream getStreamFromGlobalPool(Device device, bool = false) const override {
    return new_stream(or_current(device));
  }
  Stream getNewStream(Device device, int = 0) const override {
    return new_stream(or_current(device));
  }
  Stream exchangeStream(Stream stream) const override {
    auto index = stream.device_index();
    Stream old = stream_of(index, current_ids[index]);
    current_ids[index] = stream.id();
    return old;
  }
  bool queryStream(const Stream& stream) const override {
    return engine().is_idle(key_of(stream));
  }
  void synchronizeStream(const Stream& stream) const override {
    host_waits("Stream.synchronize");
    engine().drain(key_of(stream));
  }
  void synchronizeDevice(const DeviceIndex device) const override {
    host_waits("synchronize");
    engine().drain_device(device);
  }
  void recordDataPtrOnStream(const c10::DataPtr& data, const Stream& stream) const override {
    device_memory().recordStream(data, stream);
  }

  static MarkPtr& mark_of(void* event) { // an event is what torch keeps of it: a mark
    return *static_cast<MarkPtr*>(event);
  }
  void destroyEvent(void* event, const DeviceIndex) const noexcept override {
    delete static_cast<MarkPtr*>(event);
  }
  void record(void** event, const Stream& stream, const DeviceIndex, const c10::EventFlag) const override {
    if (!*event) *event = new MarkPtr();
    mark_of(*event) = engine().mark(key_of(stream));
  }
  void block(void* event, const Stream& stream) const override {
    if (event) engine().wait_for(key_of(stream), mark_of(event));
  }
  bool queryEvent(void* event) const override {
    return !event || engine().is_done(mark_of(event));
  }
  void synchronizeEvent(void* event) const override {
    if (!event || engine().is_done(mark_of(event))) return;
    host_waits("Event.synchronize");
    engine().stop_until(mark_of(event));
  }
  double elapsedTime(void* from, void* to, const DeviceIndex) const override {
    TORCH_CHECK(mark_of(from)->done && mark_of(to)->done, "sim: both events must be done");
    return (mark_of(to)->at - mark_of(from)->at) / 1000;
  }
};
C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard);

struct Generator final : at::CPUGeneratorImpl {
  explicit Generator(DeviceIndex index) {
    device_ = Device(KIND, index);
    key_set_ = c10::DispatchKeySet(c10::DispatchKey::PrivateUse1);
  }
};
at::Generator& default_generator(DeviceIndex index) {
  static auto* all = [] {
    auto* made = new std::vector<at::Generator>();
    for (int i = 0; i < COUNT; ++i) made->push_back(at::make_generator<Generator>(i));
    return made;
  }();
  if (index == -1) index = current;
  check_index(index);
  return (*all)[index];
}

void resize_storage(c10::StorageImpl* storage, size_t bytes) {
  c10::DeviceGuard guard(storage->device());
  auto fresh = device_memory().allocate(bytes);
  if (size_t both = std::min(bytes, storage->nbytes())) {
    Task task;
    task.effect = [to = back(fresh.get()), from = back(storage->data_ptr().get()), both] {
      std::memcpy(to, from, both);
    };
    engine().add(current_key(current), std::move(task));
  }
  storage->set_data_ptr(std::move(fresh));
  storage->set_nbytes(bytes);
}

struct Hooks final : at::PrivateUse1HooksInterface {
  void init() const override {}
  bool isBuilt() const override {
    return true;
  }
  bool isAvailable() const override {
    return COUNT > 0;
  }
  bool hasPrimaryContext(DeviceIndex) const override {
    return engine().has_started();
  }
  DeviceIndex deviceCount() const override {
    return COUNT;
  }
  void setCurrentDevice(DeviceIndex device) const override {
    check_index(device);
    current = device;
  }
  DeviceIndex getCurrentDevice() const override {
    return current;
  }
  DeviceIndex exchangeDevice(DeviceIndex device) const override {
    auto old = current;
    setCurrentDevice(device);
    return old;
  }
  DeviceIndex maybeExchangeDevice(DeviceIndex device) const override {
    return device < 0 ? current : exchangeDevice(device);
  }
  bool isPinnedPtr(const void* p) const override {
    return pinned_memory().has(p);
  }
  at::Allocator* getPinnedMemoryAllocator() const override {
    return &pinned_memory();
  }
  Device getDeviceFromPtr(void* p) const override {
    TORCH_CHECK(is_device(p), "sim: this address is of no device");
    return Device(KIND, (static_cast<char*>(p) - FACE) / ROOM);
  }
  const at::Generator& getDefaultGenerator(DeviceIndex index = -1) const override {
    return default_generator(index);
  }
  at::Generator getNewGenerator(DeviceIndex index = -1) const override {
    return at::make_generator<Generator>(index == -1 ? current : index);
  }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t bytes) const override {
    resize_storage(storage.unsafeGetStorageImpl(), bytes);
  }
};
static bool hooks = [] {
  at::RegisterPrivateUse1HooksInterface(new Hooks());
  return true;
}();
} // namespace sim
