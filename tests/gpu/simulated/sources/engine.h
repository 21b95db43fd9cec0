// Time, streams and events.
//
// Work is queued on streams and takes effect in the order of a simulated time, in one thread. Each
// task lasts so many simulated microseconds, and takes effect when they are over: so a copy that
// nobody waits for is late, every time, on however fast a machine. Nothing runs before somebody
// waits for it.
#pragma once

#include <torch/csrc/Exceptions.h>
#include <torch/csrc/utils/pybind.h>

#include <c10/core/Stream.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <pthread.h>

#include <atomic>
#include <condition_variable>
#include <deque>
#include <map>
#include <set>
#include <thread>

namespace sim {
using c10::Device;
using c10::DeviceIndex;
using c10::Stream;
using c10::StreamId;
constexpr auto KIND = c10::DeviceType::PrivateUse1;
constexpr int MOST = 16; // devices

int number(const char* name, int otherwise) {
  const char* text = std::getenv(name);
  return text ? std::atoi(text) : otherwise;
}
const int COUNT = std::min(MOST, number("SIM_DEVICES", 2));
thread_local DeviceIndex current = 0;
thread_local StreamId current_ids[MOST] = {};

// What lasts how long, in simulated microseconds. A busy device is slower than its host.
struct Pace {
  std::atomic<double> host{1}; // to queue a task
  std::atomic<double> kernel{10};
  std::atomic<double> copy{1000};
  std::atomic<double> collective{5000};
} pace;

// Give the interpreter to other threads while this one waits.
struct WithoutGil {
  std::optional<py::gil_scoped_release> released;
  WithoutGil() {
    if (Py_IsInitialized() && PyGILState_Check()) released.emplace();
  }
};

// A place in a stream: done once all that was queued before it is.
struct Mark {
  std::atomic<bool> done{false};
  double at = 0;
};
using MarkPtr = std::shared_ptr<Mark>;

struct Task {
  double lasts = 0;
  std::function<void()> effect;
  std::function<bool()> may_run; // of a collective: whether the other ranks have come
  MarkPtr after; // of another stream
  MarkPtr mark; // that it sets
  double queued = 0;
  long number = 0;
};

class Engine {
 public:
  using Key = std::pair<int, StreamId>;

  void add(Key key, Task task) {
    std::lock_guard lock(mutex);
    TORCH_CHECK(!is_forked, "Cannot re-initialize sim in forked subprocess: start it by 'spawn'");
    if (!is_started) start();
    task.queued = now += pace.host;
    task.number = ++added;
    last_added = Clock::now();
    streams[key].tasks.push_back(std::move(task));
    ++open;
  }
  // Return a mark at the end of a stream. What comes before the beginning of a collective runs in any case.
  MarkPtr mark(Key key, bool begins_collective = false) {
    Task task;
    auto made = task.mark = std::make_shared<Mark>();
    add(key, std::move(task));
    if (begins_collective) {
      std::lock_guard lock(mutex);
      collectives.push_back(made);
      changed.notify_all();
    }
    return made;
  }
  void wait_for(Key key, MarkPtr other) {
    Task task;
    task.after = std::move(other);
    add(key, std::move(task));
  }
  // Stop the calling thread until the mark is done, and raise what went wrong on the way.
  void stop_until(const MarkPtr& mark) {
    WithoutGil free;
    std::exception_ptr found;
    {
      std::unique_lock lock(mutex);
      if (!mark->done) wanted.insert(mark);
      changed.notify_all();
      changed.wait(lock, [&] { return mark->done.load(); });
      now = std::max(now, mark->at);
      std::swap(found, error);
    }
    if (found) std::rethrow_exception(found);
  }
  void drain(Key key) {
    stop_until(mark(key));
  }
  void drain_device(DeviceIndex device) {
    std::vector<Key> keys;
    {
      std::lock_guard lock(mutex);
      for (auto& [key, _] : streams)
        if (key.first == device) keys.push_back(key);
    }
    for (auto& key : keys) drain(key);
  }
  // Whether the mark would be done by now on a device.
  bool is_done(const MarkPtr& mark) {
    if (!mark->done) drain(HOST);
    return mark->done;
  }
  bool is_idle(Key key) {
    drain(HOST);
    std::lock_guard lock(mutex);
    return streams[key].tasks.empty();
  }
  // As a driver does, hold up a host that is too far ahead.
  void hold_up(Key key) {
    if (open > 4096) drain(key);
  }
  bool has_started() const {
    return is_started;
  }
  bool is_in_bad_fork() const {
    return is_forked;
  }

 private:
  using Clock = std::chrono::steady_clock;
  using Lock = std::unique_lock<std::mutex>;
  struct Queue {
    std::deque<Task> tasks;
    double clock = 0;
  };
  static constexpr Key HOST{-1, 0}; // a stream on which only the host's time passes
  static constexpr auto IDLE = std::chrono::milliseconds(5);
  static constexpr auto PATIENCE = std::chrono::milliseconds(20);

  std::mutex mutex;
  std::condition_variable changed;
  std::map<Key, Queue> streams;
  std::set<MarkPtr> wanted;
  std::deque<MarkPtr> collectives;
  std::exception_ptr error;
  double now = 0; // of the host
  long added = 0;
  std::atomic<long> open{0};
  Clock::time_point last_added;
  std::atomic<bool> is_started{false}, is_forked{false};

  void start();
  void run() {
    Lock lock(mutex);
    for (;;) {
      while (!collectives.empty() && collectives.front()->done) collectives.pop_front();
      if (!wanted.empty())
        step(lock);
      else if (collectives.empty())
        changed.wait(lock);
      else if (Clock::now() - last_added > IDLE)
        wanted.insert(collectives.front()); // others wait for it, while this host does other things
      else
        changed.wait_for(lock, IDLE);
    }
  }
  // Run the task that ends first of all that nothing holds up.
  void step(Lock& lock) {
    Queue* queue = first(false);
    if (queue && queue->tasks.front().may_run && !queue->tasks.front().may_run()) {
      auto until = Clock::now() + PATIENCE;
      auto& may_run = queue->tasks.front().may_run;
      while (!may_run() && Clock::now() < until) changed.wait_for(lock, std::chrono::microseconds(200));
      if (!may_run()) queue = first(true); // or two ranks might wait for each other
    }
    if (!queue) {
      changed.wait_for(lock, std::chrono::microseconds(200));
      return;
    }
    Task task = std::move(queue->tasks.front());
    queue->tasks.pop_front();
    queue->clock = end_of(*queue, task);
    lock.unlock();
    std::exception_ptr found;
    try {
      if (task.effect) task.effect();
    } catch (...) {
      found = std::current_exception();
    }
    task.effect = nullptr; // frees what it held, without the lock
    task.may_run = nullptr;
    lock.lock();
    if (found && !error) error = found;
    --open;
    if (!task.mark) return;
    task.mark->at = queue->clock;
    task.mark->done = true;
    wanted.erase(task.mark);
    changed.notify_all();
  }
  static double end_of(const Queue& queue, const Task& task) {
    return std::max({queue.clock, task.queued, task.after ? task.after->at : 0}) + task.lasts;
  }
  Queue* first(bool only_what_may_run) {
    Queue* found = nullptr;
    std::pair<double, long> least;
    for (auto& [_, queue] : streams) {
      if (queue.tasks.empty()) continue;
      auto& task = queue.tasks.front();
      if (task.after && !task.after->done) continue;
      if (only_what_may_run && task.may_run && !task.may_run()) continue;
      std::pair<double, long> end{end_of(queue, task), task.number};
      if (!found || end < least) found = &queue, least = end;
    }
    return found;
  }
};
Engine& engine() {
  static auto* made = new Engine(); // never ends: its thread ends with the process
  return *made;
}
void Engine::start() {
  is_started = true;
  pthread_atfork(nullptr, nullptr, [] { engine().is_forked = true; });
  std::thread([this] {
    c10::impl::ExcludeDispatchKeyGuard below(c10::autograd_dispatch_keyset_with_ADInplaceOrView);
    run();
  }).detach();
}

// ---- streams, as torch names them
Engine::Key key_of(Stream stream) {
  return {stream.device_index(), stream.id()};
}
Engine::Key current_key(DeviceIndex device) {
  return {device, current_ids[device]};
}
Stream stream_of(DeviceIndex device, StreamId id) {
  return Stream(Stream::UNSAFE, Device(KIND, device), id);
}
Stream new_stream(DeviceIndex device) { // one of a pool, as CUDA's
  static std::atomic<StreamId> next[MOST];
  return stream_of(device, 1 + next[device]++ % 32);
}
Stream new_stream_of_collectives(DeviceIndex device) {
  static std::atomic<StreamId> next{1000};
  return stream_of(device, next++);
}
DeviceIndex or_current(Device device) {
  return device.has_index() ? device.index() : current;
}
void check_index(DeviceIndex device) {
  TORCH_CHECK(device >= 0 && device < COUNT, "sim: there is no device ", int(device), " of ", COUNT);
}

// ---- host waits: counted by name, and refused if a test asks for it
std::atomic<int> refuses_waits{0}; // as torch.cuda.set_sync_debug_mode: 1 warns, 2 raises
std::mutex waits_mutex;
std::map<std::string, long> waits;

void host_waits(const std::string& what) {
  TORCH_CHECK(refuses_waits != 2, "called a synchronizing operation: ", what);
  if (refuses_waits == 1) {
    py::gil_scoped_acquire held;
    auto text = "called a synchronizing operation: " + what;
    if (PyErr_WarnEx(PyExc_UserWarning, text.c_str(), 1)) throw python_error();
  }
  std::lock_guard lock(waits_mutex);
  ++waits[what];
}
} // namespace sim
