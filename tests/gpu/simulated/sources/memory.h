// Memory: of the device, which the CPU cannot read, and pinned memory of the host.
//
// Device memory is mapped twice. Tensors have addresses that no one can read: a CPU kernel that is
// given one ends the process. Kernels of this device reach the same place at another address.
// A stream's freed memory is its own again at once; if other streams were recorded, only once these
// have come so far. The stream's next allocation turns all of it into NaN, in the order of that
// stream: CUDA may give any of it away then, and not before. New memory is NaN as well.
#pragma once

#include "engine.h"

#include <ATen/core/CachingHostAllocator.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <sys/mman.h>

#include <list>

namespace sim {
constexpr size_t ROOM = size_t(1) << 35; // addresses of a device
constexpr size_t ALIGNMENT = 512;

char* reserve(int protection) {
  void* found = mmap(nullptr, ROOM * COUNT, protection, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  TORCH_CHECK(found != MAP_FAILED, "sim: no address space");
  return static_cast<char*>(found);
}
char* const FACE = reserve(PROT_NONE);
char* const BACK = reserve(PROT_READ | PROT_WRITE);

bool is_device(const void* p) {
  return p >= FACE && p < FACE + ROOM * COUNT;
}
char* back(const void* p) {
  return p == nullptr ? nullptr : BACK + (static_cast<const char*>(p) - FACE);
}

// Memory that has been freed while streams still use it.
template <typename Block>
struct Waiting {
  std::list<std::tuple<std::vector<MarkPtr>, char*, Block>> blocks;

  void add(const std::set<Engine::Key>& users, char* p, const Block& block) {
    std::vector<MarkPtr> marks;
    for (auto& user : users) marks.push_back(engine().mark(user));
    blocks.emplace_back(std::move(marks), p, block);
  }
  template <typename Retire>
  void retire_if_done(Retire retire) {
    for (auto it = blocks.begin(); it != blocks.end();) {
      auto& [marks, p, block] = *it;
      bool done = std::all_of(marks.begin(), marks.end(), [](auto& mark) { return mark->done.load(); });
      if (done) retire(p, block);
      it = done ? blocks.erase(it) : std::next(it);
    }
  }
};

void free_device(void*);

struct DeviceMemory final : c10::DeviceAllocator {
  struct Block {
    size_t size;
    Engine::Key stream; // that it was made on
    std::set<Engine::Key> users;
  };
  std::mutex mutex;
  std::map<char*, Block> live;
  std::multimap<std::pair<Engine::Key, size_t>, char*> unused;
  std::map<Engine::Key, std::vector<std::pair<char*, size_t>>> freed; // since the last allocation
  Waiting<Block> waiting;
  size_t top[MOST] = {};
  c10::CachingDeviceAllocator::DeviceStats stats[MOST];

  at::DataPtr allocate(size_t bytes) override {
    DeviceIndex device = current;
    if (bytes == 0) return {nullptr, nullptr, &free_device, Device(KIND, device)};
    size_t size = (bytes + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT;
    auto stream = current_key(device);
    std::lock_guard lock(mutex);
    waiting.retire_if_done([this](char* p, const Block& block) { retire(p, block); });
    for (auto& [p, size] : freed[stream]) poison(p, size, stream);
    freed[stream].clear();
    char* p;
    auto found = unused.find({stream, size});
    if (found != unused.end()) {
      p = found->second;
      unused.erase(found);
    } else {
      TORCH_CHECK_WITH(OutOfMemoryError, top[device] + size <= ROOM, "sim: out of memory");
      p = FACE + ROOM * device + top[device];
      top[device] += size;
      stats[device].reserved_bytes[0].increase(size);
      poison(p, size, stream);
    }
    stats[device].allocated_bytes[0].increase(size);
    live[p] = Block{size, stream, {}};
    return {p, p, &free_device, Device(KIND, device)};
  }
  void give_back(char* p) {
    if (engine().is_in_bad_fork()) return;
    std::lock_guard lock(mutex);
    auto node = live.extract(p);
    if (node.empty()) return;
    auto& block = node.mapped();
    stats[block.stream.first].allocated_bytes[0].decrease(block.size);
    block.users.erase(block.stream);
    if (block.users.empty())
      retire(p, block);
    else
      waiting.add(block.users, p, block);
  }
  void retire(char* p, const Block& block) {
    freed[block.stream].emplace_back(p, block.size);
    unused.emplace(std::pair(block.stream, block.size), p);
  }
  static void poison(char* p, size_t size, Engine::Key stream) {
    Task task;
    task.effect = [p, size] { std::memset(back(p), 0xFF, size); };
    engine().add(stream, std::move(task));
  }
  void recordStream(const at::DataPtr& data, Stream stream) override {
    std::lock_guard lock(mutex);
    auto found = live.find(static_cast<char*>(data.get()));
    if (found != live.end()) found->second.users.insert(key_of(stream));
  }
  at::DeleterFnPtr raw_deleter() const override {
    return &free_device;
  }
  void copy_data(void* to, const void* from, size_t bytes) const override {
    engine().drain(current_key(current));
    std::memcpy(back(to), back(from), bytes);
  }
  bool initialized() override {
    return true;
  }
  void emptyCache(c10::MempoolId_t = {0, 0}) override {}
  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(DeviceIndex device) override {
    std::lock_guard lock(mutex);
    return stats[device];
  }
  void resetAccumulatedStats(DeviceIndex) override {}
  void resetPeakStats(DeviceIndex device) override {
    std::lock_guard lock(mutex);
    stats[device].allocated_bytes[0].reset_peak();
    stats[device].reserved_bytes[0].reset_peak();
  }
};
DeviceMemory& device_memory() {
  static auto* made = new DeviceMemory();
  return *made;
}
void free_device(void* p) {
  if (p) device_memory().give_back(static_cast<char*>(p));
}

void free_pinned(void*);

struct PinnedMemory final : at::HostAllocator {
  struct Block {
    size_t size;
    std::set<Engine::Key> users;
  };
  std::mutex mutex;
  std::map<char*, Block> live;
  Waiting<Block> waiting;

  at::DataPtr allocate(size_t bytes) override {
    if (bytes == 0) return {nullptr, nullptr, &free_pinned, Device(at::kCPU)};
    size_t size = (bytes + 4095) / 4096 * 4096;
    void* p = nullptr;
    TORCH_CHECK(posix_memalign(&p, 4096, size) == 0, "sim: no host memory");
    std::memset(p, 0xFF, size);
    std::lock_guard lock(mutex);
    waiting.retire_if_done([this](char* q, const Block& block) { retire(q, block); });
    live[static_cast<char*>(p)] = Block{size, {}};
    return {p, p, &free_pinned, Device(at::kCPU)};
  }
  void give_back(char* p) {
    if (engine().is_in_bad_fork()) return;
    std::lock_guard lock(mutex);
    auto node = live.extract(p);
    if (node.empty()) return;
    if (node.mapped().users.empty())
      retire(p, node.mapped());
    else
      waiting.add(node.mapped().users, p, node.mapped());
  }
  void retire(char* p, const Block& block) {
    std::memset(p, 0xFF, block.size);
    std::free(p);
  }
  std::map<char*, Block>::iterator find(const void* p) {
    auto it = live.upper_bound(static_cast<char*>(const_cast<void*>(p)));
    if (it == live.begin()) return live.end();
    --it;
    return static_cast<const char*>(p) < it->first + it->second.size ? it : live.end();
  }
  bool has(const void* p) {
    std::lock_guard lock(mutex);
    return find(p) != live.end();
  }
  bool record_event(void* p, void*, Stream stream) override {
    std::lock_guard lock(mutex);
    auto found = find(p);
    if (found == live.end()) return false;
    found->second.users.insert(key_of(stream));
    return true;
  }
  at::DeleterFnPtr raw_deleter() const override {
    return &free_pinned;
  }
  void copy_data(void* to, const void* from, size_t bytes) const override {
    std::memcpy(to, from, bytes);
  }
  void empty_cache() override {}
  at::HostStats get_stats() override {
    return {};
  }
  void reset_accumulated_stats() override {}
  void reset_peak_stats() override {}
};
PinnedMemory& pinned_memory() {
  static auto* made = new PinnedMemory();
  return *made;
}
void free_pinned(void* p) {
  if (p) pinned_memory().give_back(static_cast<char*>(p));
}

static bool allocators = [] {
  c10::SetAllocator(KIND, &device_memory(), 0);
  at::setHostAllocator(at::kPrivateUse1, &pinned_memory(), 0);
  return true;
}();
} // namespace sim
