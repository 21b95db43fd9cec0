// The Python module: what the files of this folder give to `simulated/device.py`.
#include "collectives.h"

#include <torch/csrc/Generator.h>

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  py::module_::import("torch._C._distributed_c10d");
  m.def("collectives", [](sim::BackendPtr gloo, bool is_gloo) -> sim::BackendPtr {
    return c10::make_intrusive<sim::Collectives>(gloo, is_gloo);
  });
  m.def("device_count", [] { return sim::COUNT; });
  m.def("current_device", [] { return int(sim::current); });
  m.def("set_device", [](int device) {
    sim::check_index(device);
    sim::current = device;
  });
  m.def("is_initialized", [] { return sim::engine().has_started(); });
  m.def("is_in_bad_fork", [] { return sim::engine().is_in_bad_fork(); });
  m.def("default_generator", [](int device) {
    return py::reinterpret_steal<py::object>(THPGenerator_Wrap(sim::default_generator(device)));
  });
  m.def("sleep", [](double microseconds) { sim::launch({sim::KIND, sim::current}, microseconds, {}); });
  m.def("set_pace", [](double host, double kernel, double copy, double collective) {
    sim::pace.host = host;
    sim::pace.kernel = kernel;
    sim::pace.copy = copy;
    sim::pace.collective = collective;
  });
  m.def("refuse_waits", [](int how) { sim::refuses_waits = how; });
  m.def("launches", [] { return long(sim::launches); });
  m.def("waits", [] {
    std::lock_guard lock(sim::waits_mutex);
    return sim::waits;
  });
}
