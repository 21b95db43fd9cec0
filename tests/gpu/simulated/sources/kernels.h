// Kernels: the CPU's, on the reachable side of the memory, in the order of the stream.
//
// Results' sizes come from the operator's meta kernel, so the host goes on at once. What cannot be
// done so is listed below, and what is in no list is an error.
#pragma once

#include "device.h"

#include <ATen/ATen.h>
#include <ATen/EmptyTensor.h>
#include <ATen/autocast_mode.h>
#include <ATen/native/IndexingUtils.h>
#include <ATen/ops/_coalesced_native.h>
#include <ATen/ops/_indices_native.h>
#include <ATen/ops/_nnz_native.h>
#include <ATen/ops/_sparse_coo_tensor_with_dims_and_tensors_native.h>
#include <ATen/ops/_values_native.h>
#include <ATen/ops/copy_native.h>
#include <ATen/ops/dense_dim_native.h>
#include <ATen/ops/indices_native.h>
#include <ATen/ops/is_coalesced_native.h>
#include <ATen/ops/set_cpu_dispatch.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/sparse_dim_native.h>
#include <ATen/ops/values_native.h>
#include <torch/library.h>

namespace sim {
using at::Tensor;
using c10::IValue;
using torch::jit::Stack;

// Operators whose results' sizes or values the host needs: CUDA waits for these too.
const std::set<std::string> WAIT{
    "aten::_unique2", "aten::bincount", "aten::equal", "aten::masked_select", "aten::nonzero",
    "aten::repeat_interleave", "aten::unique_consecutive", "aten::unique_dim"};

bool is_here(const Tensor& t) {
  return t.defined() && t.device().type() == KIND;
}
// The same tensor as CPU kernels see it. It owns no memory.
Tensor reachable(const Tensor& t) {
  if (!is_here(t)) return t;
  auto* impl = t.unsafeGetTensorImpl();
  c10::Storage storage(
      c10::Storage::use_byte_size_t(), impl->storage().nbytes(),
      c10::DataPtr(back(impl->storage().data_ptr().get()), Device(at::kCPU)), nullptr, false);
  auto made = at::detail::make_tensor<c10::TensorImpl>(
      std::move(storage), c10::DispatchKeySet(c10::DispatchKey::CPU), t.dtype());
  made.unsafeGetTensorImpl()->set_sizes_and_strides(t.sizes(), t.strides(), t.storage_offset());
  if (impl->is_wrapped_number()) made.unsafeGetTensorImpl()->set_wrapped_number(true);
  return made;
}
void write(const Tensor& to, const Tensor& from) {
  at::native::copy_(const_cast<Tensor&>(to), from, false);
}
std::atomic<long> launches{0}; // kernels and copies of this process
void launch(Device device, double lasts, std::function<void()> effect) {
  ++launches;
  Task task;
  task.lasts = lasts;
  task.effect = std::move(effect);
  engine().add(current_key(device.index()), std::move(task));
  engine().hold_up(current_key(device.index()));
}

// ---- memory of tensors
const c10::DispatchKeySet OURS(c10::DispatchKey::PrivateUse1);
Tensor empty_memory_format(
    c10::IntArrayRef size, std::optional<c10::ScalarType> dtype, std::optional<c10::Layout>,
    std::optional<Device> device, std::optional<bool>, std::optional<c10::MemoryFormat> format) {
  c10::DeviceGuard guard(c10::device_or_default(device));
  return at::detail::empty_generic(size, &device_memory(), OURS, c10::dtype_or_default(dtype), format);
}
Tensor empty_strided(
    c10::IntArrayRef size, c10::IntArrayRef stride, std::optional<c10::ScalarType> dtype,
    std::optional<c10::Layout>, std::optional<Device> device, std::optional<bool>) {
  c10::DeviceGuard guard(c10::device_or_default(device));
  return at::detail::empty_strided_generic(size, stride, &device_memory(), OURS, c10::dtype_or_default(dtype));
}
Tensor as_strided(
    const Tensor& self, c10::IntArrayRef size, c10::IntArrayRef stride, std::optional<int64_t> offset) {
  auto made = at::detail::make_tensor<c10::TensorImpl>(
      c10::TensorImpl::VIEW, c10::Storage(self.storage()), self.key_set(), self.dtype());
  made.unsafeGetTensorImpl()->set_sizes_and_strides(size, stride, offset.value_or(self.storage_offset()));
  return made;
}
const Tensor& resize_(const Tensor& self, c10::IntArrayRef size, std::optional<c10::MemoryFormat>) {
  auto* impl = self.unsafeGetTensorImpl();
  impl->set_sizes_contiguous(size);
  size_t needed = (impl->storage_offset() + impl->numel()) * impl->itemsize();
  if (impl->numel() && needed > impl->storage().nbytes())
    resize_storage(impl->storage().unsafeGetStorageImpl(), needed);
  return self;
}
void record_stream(Tensor& self, Stream stream) {
  device_memory().recordStream(self.storage().data_ptr(), stream);
}

// ---- copies
Tensor unowned(const Tensor& t) {
  return at::from_blob(t.data_ptr(), t.sizes(), t.strides(), t.options());
}
Tensor copy_from(const Tensor& self, const Tensor& dst, bool non_blocking) {
  if (self.numel() == 0) return dst;
  bool on = self.is_cpu(), off = dst.is_cpu();
  auto device = off ? self.device() : dst.device();
  auto key = current_key(device.index());
  const Tensor& host = on ? self : dst;
  bool is_pinned = (on || off) && pinned_memory().has(host.storage().data());
  bool waits = (on || off) && !(non_blocking && (is_pinned || on));
  if (waits) host_waits(on ? "copy onto the device" : "copy off the device");
  // Of other memory the driver may wait, and torch does not say so.
  if (on && !waits && !is_pinned) host_waits("copy of memory that is not pinned");
  Tensor from = reachable(self), to = reachable(dst);
  if (is_pinned) {
    void* p = const_cast<void*>(host.storage().data());
    pinned_memory().record_event(p, nullptr, stream_of(key.first, key.second));
  }
  if (on) from = is_pinned ? unowned(self) : self.clone(); // the driver reads pinned memory later, other now
  if (off) to = unowned(dst);
  auto source = current_key(off || on ? device.index() : self.device().index());
  if (source != key) engine().wait_for(source, engine().mark(key));
  Task task;
  task.lasts = on || off || source != key ? pace.copy : pace.kernel;
  task.effect = [from, to] { write(to, from); };
  ++launches;
  engine().add(source, std::move(task));
  if (source != key) engine().wait_for(key, engine().mark(source));
  if (waits) engine().drain(key);
  return dst;
}
Tensor copy_from_and_resize(const Tensor& self, const Tensor& dst) {
  dst.resize_(self.sizes());
  return copy_from(self, dst, false);
}
at::Scalar local_scalar_dense(const Tensor& self) {
  host_waits("item");
  engine().drain(current_key(self.device().index()));
  return reachable(self).item();
}

// ---- all other operators
template <typename F>
IValue mapped(const IValue& value, Device device, F f) {
  if (value.isTensor()) return f(value.toTensor());
  if (value.isTensorList()) {
    c10::List<Tensor> list;
    for (const Tensor& t : value.toTensorVector()) list.push_back(f(t));
    return list;
  }
  if (value.isOptionalTensorList()) {
    c10::List<std::optional<Tensor>> list;
    for (const std::optional<Tensor>& t : value.toOptionalTensorVector())
      list.push_back(t ? std::optional<Tensor>(f(*t)) : std::nullopt);
    return list;
  }
  if (value.isDevice()) return device;
  return value;
}
bool is_written(const c10::Argument& one) {
  return one.alias_info() && one.alias_info()->isWrite();
}

// One call of an operator.
struct Call {
  const c10::FunctionSchema& schema;
  std::string name;
  Stack args;
  std::optional<Device> device;
  std::optional<size_t> generator; // the argument's place

  Call(const c10::OperatorHandle& op, Stack* stack)
      : schema(op.schema()), name(schema.name()), args(torch::jit::pop(*stack, schema.arguments().size())) {
    for (size_t i = 0; i < args.size(); ++i) {
      mapped(args[i], at::kCPU, [this](const Tensor& t) { return see(t), t; });
      if (args[i].isDevice() && args[i].toDevice().type() == KIND && !device) device = args[i].toDevice();
      if (schema.arguments()[i].type()->str() == "Generator?" || args[i].isGenerator()) generator = i;
    }
    if (!device || !device->has_index()) device = Device(KIND, current);
  }
  void see(const Tensor& t) {
    if (!t.defined()) return;
    bool here = is_here(t);
    TORCH_CHECK(
        !t.dim() || (here ? !device || !device_has_rows || *device == t.device() : indexes(t)),
        "Expected all tensors to be on the same device, but found at least two devices, ",
        device.value_or(Device(KIND, current)), " and ", t.device(), "! (", name, ")");
    if (here && (!device || t.dim())) device = t.device(), device_has_rows = t.dim() > 0;
  }
  bool indexes(const Tensor& t) { // by a tensor of the CPU, which CUDA copies and waits for
    bool is_allowed = name.find("index") != std::string::npos;
    if (is_allowed) host_waits("index of the CPU");
    return is_allowed;
  }
  bool device_has_rows = false;

  // Return the arguments for the CPU.
  Stack on_host() {
    Stack made;
    auto own = [](const Tensor& t) { return t.defined() && t.is_cpu() ? t.clone() : reachable(t); };
    for (auto& arg : args) made.push_back(mapped(arg, at::kCPU, own));
    if (generator) made[*generator] = seeded_generator();
    return made;
  }
  // Return a generator of the CPU for this call alone. The device's moves on by one number.
  IValue seeded_generator() {
    auto& given = args[*generator];
    auto own = given.isGenerator() ? given.toGenerator() : default_generator(device->index());
    auto where = own.device();
    TORCH_CHECK(where.type() == KIND, "Expected a 'sim' device type for generator but found '", where, "'");
    std::lock_guard lock(own.mutex());
    auto seed = static_cast<Generator*>(own.unsafeGetGeneratorImpl())->random64();
    return at::make_generator<at::CPUGeneratorImpl>(seed);
  }
  Stack meta() {
    Stack made;
    for (auto& arg : args)
      made.push_back(mapped(arg, at::kMeta, [](const Tensor& t) {
        if (!t.defined() || (t.dim() == 0 && t.is_cpu())) return t;
        if (t.unsafeGetTensorImpl()->is_wrapped_number()) return t;
        return at::empty_strided(t.sizes(), t.strides(), t.options().device(at::kMeta).pinned_memory(false));
      }));
    if (generator) made[*generator] = IValue();
    return made;
  }
  const IValue& aliased(const c10::Argument& result) {
    for (size_t i = 0; i < args.size(); ++i) {
      auto* info = schema.arguments()[i].alias_info();
      if (info && info->beforeSets() == result.alias_info()->beforeSets()) return args[i];
    }
    TORCH_CHECK(false, "sim: ", name, " returns a view of nothing it was given");
  }
};

// Tensors on the device of what meta kernels returned, or what arguments they are.
Stack results_like(Call& call, Stack& shapes) {
  Stack made;
  auto empty = [&](const Tensor& t) {
    return t.defined() ? at::empty_strided(t.sizes(), t.strides(), t.options().device(*call.device)) : t;
  };
  for (size_t i = 0; i < shapes.size(); ++i) {
    auto& result = call.schema.returns()[i];
    if (!result.alias_info()) {
      bool is_known = shapes[i].isTensor() || shapes[i].isTensorList();
      TORCH_CHECK(is_known, "sim: ", call.name, " returns what only its kernel knows");
      made.push_back(mapped(shapes[i], *call.device, empty));
      continue;
    }
    IValue own = call.aliased(result);
    if (own.isTensor() && !is_written(result)) {
      const Tensor &base = own.toTensor(), shape = shapes[i].toTensor();
      auto offset = base.storage_offset() + shape.storage_offset();
      own = at::as_strided(base, shape.sizes(), shape.strides(), offset);
    } else if (own.isTensor() && own.toTensor().sizes() != shapes[i].toTensor().sizes()) {
      own.toTensor().resize_(shapes[i].toTensor().sizes()); // `out=` of another size
    }
    made.push_back(own);
  }
  return made;
}

// Run it now, after all that is queued.
void run_at_once(Call& call, const c10::OperatorHandle& run, Stack* stack) {
  auto own = call.on_host();
  engine().drain(current_key(call.device->index()));
  run.callBoxed(&own);
  for (size_t i = 0; i < own.size(); ++i) {
    TORCH_CHECK(!call.schema.returns()[i].alias_info(), "sim: ", call.name, " cannot be run at once");
    stack->push_back(mapped(own[i], *call.device, [&](const Tensor& t) {
      Tensor made = at::empty_strided(t.sizes(), t.strides(), t.options().device(*call.device));
      launch(*call.device, 0, [to = reachable(made), t] { write(to, t); });
      return made;
    }));
  }
}

void queue_call(Call& call, const c10::OperatorHandle& run, Stack* stack) {
  auto& returns = call.schema.returns();
  auto shapes = call.meta();
  run.callBoxed(&shapes);
  auto results = results_like(call, shapes);
  for (auto& one : results) stack->push_back(one);
  auto is_view = [](auto& result) { return result.alias_info() && !is_written(result); };
  if (!returns.empty() && std::all_of(returns.begin(), returns.end(), is_view)) return;
  auto own = call.on_host();
  std::vector<std::vector<Tensor>> made(results.size()); // of each new result
  for (size_t i = 0; i < results.size(); ++i) {
    if (returns[i].alias_info()) continue;
    if (results[i].isTensor()) made[i] = {reachable(results[i].toTensor())};
    if (results[i].isTensorList())
      for (const Tensor& t : results[i].toTensorVector()) made[i].push_back(reachable(t));
  }
  launch(*call.device, pace.kernel, [run, own, made] {
    Stack values(own);
    run.callBoxed(&values);
    for (size_t i = 0; i < made.size(); ++i)
      for (size_t j = 0; j < made[i].size(); ++j) {
        Tensor found = values[i].isTensor() ? values[i].toTensor() : values[i].toTensorVector()[j];
        if (made[i][j].defined() && found.defined()) write(made[i][j], found);
      }
  });
}

// An index of truth values becomes one of numbers, for which the host waits.
void expand_masks(Call& call) {
  for (auto& arg : call.args) {
    if (!arg.isOptionalTensorList()) continue;
    auto list = arg.toOptionalTensorList();
    auto has_mask = [](const std::optional<Tensor>& t) {
      return t && t->defined() && (t->scalar_type() == at::kBool || t->scalar_type() == at::kByte);
    };
    auto given = list.vec();
    if (std::none_of(given.begin(), given.end(), has_mask)) continue;
    c10::List<std::optional<Tensor>> numbers;
    for (auto& t : at::native::expandTensors(call.args[0].toTensor(), list))
      numbers.push_back(t.defined() ? std::optional<Tensor>(t) : std::nullopt);
    arg = numbers;
  }
}

void fallback(const c10::OperatorHandle& op, Stack* stack) {
  Call call(op, stack);
  c10::OperatorHandle run = op;
  auto suffix = call.name.rfind("_overrideable");
  if (suffix != std::string::npos)
    run = c10::Dispatcher::singleton().findSchemaOrThrow(call.name.substr(0, suffix).c_str(), "");
  if (call.name == "aten::convolution_backward_overrideable") { // has one argument less
    int64_t biases = call.args[2].toTensor().size(call.args[6].toBool() ? 1 : 0);
    call.args.insert(call.args.begin() + 3, IValue(std::vector<int64_t>{biases}));
  }
  expand_masks(call);
  bool has_kernel = run.hasComputedKernelForDispatchKey(c10::DispatchKey::CPU);
  bool is_known = !op.hasTag(at::Tag::nondeterministic_seeded) || call.generator;
  TORCH_CHECK_NOT_IMPLEMENTED(
      has_kernel && is_known, "sim: the simulated accelerator has no kernel of ", call.name);
  c10::DeviceGuard guard(*call.device);
  if (!WAIT.count(call.name)) return queue_call(call, run, stack);
  host_waits(call.name);
  run_at_once(call, run, stack);
}

// ---- CUDA's own ways
std::tuple<Tensor, Tensor> native_dropout(const Tensor& input, double p, std::optional<bool> train) {
  auto mask = at::empty_like(input, input.options().dtype(at::kBool));
  mask.bernoulli_(train.value_or(true) ? 1 - p : 1);
  return {input.mul(mask).mul_(train.value_or(true) ? (p == 1 ? 0 : 1 / (1 - p)) : 1), mask};
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) {
  m.fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>());
}
TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", empty_memory_format);
  m.impl("empty_strided", empty_strided);
  m.impl("as_strided", as_strided);
  m.impl("resize_", resize_);
  m.impl("_copy_from", copy_from);
  m.impl("_copy_from_and_resize", copy_from_and_resize);
  m.impl("_local_scalar_dense", local_scalar_dense);
  m.impl("record_stream", record_stream);
  m.impl("native_dropout", native_dropout);
  m.impl("convolution_overrideable", torch::CppFunction::makeFromBoxedFunction<&fallback>());
  m.impl("convolution_backward_overrideable", torch::CppFunction::makeFromBoxedFunction<&fallback>());
  m.impl("set_.source_Tensor", [](Tensor& self, const Tensor& other) -> Tensor& {
    return at::native::set_tensor_(self, other);
  });
  m.impl("set_.source_Storage", [](Tensor& self, at::Storage other) -> Tensor& {
    return at::native::set_(self, other);
  });
  m.impl(
      "set_.source_Storage_storage_offset",
      [](Tensor& self, at::Storage other, int64_t offset, c10::IntArrayRef size,
         c10::IntArrayRef stride) -> Tensor& { return at::cpu::set_(self, other, offset, size, stride); });
}

// ---- sparse tensors: made, taken apart and put together again
TORCH_LIBRARY_IMPL(aten, SparsePrivateUse1, m) {
  m.impl("_sparse_coo_tensor_with_dims_and_tensors", at::native::new_with_dims_and_tensor_sparse_symint);
  m.impl("_values", at::native::_values_sparse);
  m.impl("values", at::native::values_sparse);
  m.impl("_indices", at::native::_indices_sparse);
  m.impl("indices", at::native::indices_sparse);
  m.impl("is_coalesced", at::native::is_coalesced_sparse);
  m.impl("_coalesced_", at::native::_coalesced_sparse_);
  m.impl("_nnz", at::native::_nnz_sparse);
  m.impl("sparse_dim", at::native::sparse_dim_sparse);
  m.impl("dense_dim", at::native::dense_dim_sparse);
}

// ---- autocast: CUDA's lists
#define LOWER(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, lower_precision_fp)
#define FULL(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, fp32)
#define FULL_IF_NOT_SAID(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, fp32_set_opt_dtype)
#define PROMOTE(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, promote)
TORCH_LIBRARY_IMPL(_, AutocastPrivateUse1, m) {
  m.fallback(torch::CppFunction::makeFallthrough());
}
TORCH_LIBRARY_IMPL(aten, AutocastPrivateUse1, m) {
  AT_FORALL_LOWER_PRECISION_FP(LOWER)
  AT_FORALL_FP32(FULL)
  AT_FORALL_FP32_SET_OPT_DTYPE(FULL_IF_NOT_SAID)
  AT_FORALL_PROMOTE(PROMOTE)
}
} // namespace sim
