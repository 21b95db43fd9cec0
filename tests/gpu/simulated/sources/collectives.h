// Collectives: gloo's, on a stream of their own, as NCCL's.
//
// A collective begins once the work before it on the current stream is done. `Work.wait` lets the
// current stream wait and not the host; of a group of gloo itself, the host too.
#pragma once

#include "kernels.h"

#include <c10/core/StreamGuard.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Work.hpp>

#include <future>

namespace sim {
using WorkPtr = c10::intrusive_ptr<c10d::Work>;
using BackendPtr = c10::intrusive_ptr<c10d::Backend>;
using Tensors = std::vector<Tensor>;

struct Work final : c10d::Work {
  Device device;
  MarkPtr end;
  bool stops_host;
  c10::intrusive_ptr<c10::ivalue::Future> future;

  Work(Device device, MarkPtr end, bool stops_host, Tensors out, Stream stream)
      : device(device), end(end), stops_host(stops_host) {
    c10::StreamGuard guard(stream);
    auto type = c10::ListType::create(c10::TensorType::get());
    future = c10::make_intrusive<c10::ivalue::Future>(type, std::vector<Device>{device});
    future->markCompleted(IValue(out));
  }
  bool isCompleted() override {
    return engine().is_done(end);
  }
  bool isSuccess() const override {
    return true;
  }
  void synchronize() override {
    engine().wait_for(current_key(device.index()), end);
  }
  bool wait(std::chrono::milliseconds = std::chrono::milliseconds(0)) override {
    synchronize();
    if (stops_host) {
      host_waits("Work.wait");
      engine().stop_until(end);
    }
    return true;
  }
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override {
    return future;
  }
};

struct Collectives final : c10d::Backend {
  BackendPtr gloo;
  bool is_gloo; // whether it stands for gloo itself
  std::map<DeviceIndex, Stream> streams;

  Collectives(BackendPtr gloo, bool is_gloo)
      : Backend(gloo->getRank(), gloo->getSize()), gloo(gloo), is_gloo(is_gloo) {}
  const std::string getBackendName() const override {
    return is_gloo ? "gloo" : "simccl";
  }
  Stream stream_of_device(DeviceIndex index) {
    auto found = streams.find(index);
    if (found == streams.end()) found = streams.emplace(index, new_stream_of_collectives(index)).first;
    return found->second;
  }

  // One collective under way: what gloo reads and writes are copies, which it has from begin to end.
  struct Transfer {
    Tensors out, in;
    std::future<void> done;
  };
  using Begin = std::function<std::vector<WorkPtr>(Tensors& out, Tensors& in)>;

  static Tensors reached(const Tensors& all) {
    Tensors made;
    for (auto& t : all) made.push_back(reachable(t));
    return made;
  }
  static Tensors copied(const Tensors& all) {
    Tensors made;
    for (auto& t : all) made.push_back(t.clone(at::MemoryFormat::Contiguous));
    return made;
  }
  static Task begun(std::shared_ptr<Transfer> transfer, Begin begin, const Tensors& out, const Tensors& in) {
    Task task;
    task.effect = [transfer, begin, out = reached(out), in = reached(in)] {
      transfer->out = copied(out);
      transfer->in = copied(in);
      auto works = begin(transfer->out, transfer->in);
      transfer->done = std::async(std::launch::async, [works] { // not every Work of gloo can be asked
        for (auto& work : works) work->wait();
      });
    };
    return task;
  }
  static Task ended(std::shared_ptr<Transfer> transfer, const Tensors& out, int divisor) {
    Task task;
    task.lasts = pace.collective;
    task.may_run = [transfer] {
      auto& done = transfer->done;
      return !done.valid() || done.wait_for(std::chrono::seconds(0)) == std::future_status::ready;
    };
    task.effect = [transfer, out = reached(out), divisor] {
      if (!transfer->done.valid()) return; // it did not begin
      transfer->done.get();
      for (size_t i = 0; i < out.size(); ++i) {
        if (divisor != 1) transfer->out[i].div_(divisor);
        write(out[i], transfer->out[i]);
      }
    };
    return task;
  }
  WorkPtr run(const Tensors& out, const Tensors& in, Begin begin, int divisor = 1) {
    Tensors all(out);
    all.insert(all.end(), in.begin(), in.end());
    Device device = all.at(0).device();
    for (auto& t : all)
      TORCH_CHECK(t.device() == device, "sim: all tensors of a collective must be on ", device);
    Stream stream = stream_of_device(device.index());
    auto key = key_of(stream);
    auto transfer = std::make_shared<Transfer>();
    engine().wait_for(key, engine().mark(current_key(device.index())));
    engine().add(key, begun(transfer, begin, out, in));
    engine().mark(key, true); // the other ranks need what this one sends, and this one waits for nothing
    engine().add(key, ended(transfer, out, divisor));
    for (auto& t : all) device_memory().recordStream(t.storage().data_ptr(), stream);
    return c10::make_intrusive<Work>(device, engine().mark(key), is_gloo, out, stream);
  }
  // gloo has no mean: return what its sum is to be divided by.
  template <typename Options>
  int divisor_of(Options& options) {
    if (options.reduceOp != c10d::ReduceOp::AVG) return 1;
    options.reduceOp = c10d::ReduceOp::SUM;
    return getSize();
  }

  WorkPtr allreduce(Tensors& t, const c10d::AllreduceOptions& options) override {
    auto own = options;
    int divisor = divisor_of(own);
    auto begin = [g = gloo, own](Tensors& out, Tensors&) {
      std::vector<WorkPtr> works;
      for (auto& one : out) {
        Tensors alone{one};
        works.push_back(g->allreduce(alone, own));
      }
      return works;
    };
    return run(t, {}, begin, divisor);
  }
  WorkPtr allreduce_coalesced(Tensors& t, const c10d::AllreduceCoalescedOptions& options) override {
    return allreduce(t, options);
  }
  WorkPtr broadcast(Tensors& t, const c10d::BroadcastOptions& options) override {
    return run(t, {}, [g = gloo, options](Tensors& out, Tensors&) {
      return std::vector{g->broadcast(out, options)};
    });
  }
  WorkPtr reduce(Tensors& t, const c10d::ReduceOptions& options) override {
    auto own = options;
    int divisor = divisor_of(own);
    auto begin = [g = gloo, own](Tensors& out, Tensors&) { return std::vector{g->reduce(out, own)}; };
    return run(t, {}, begin, divisor);
  }
  WorkPtr allgather(std::vector<Tensors>& lists, Tensors& t, const c10d::AllgatherOptions& options) override {
    return run(lists.at(0), t, [g = gloo, options](Tensors& out, Tensors& in) {
      std::vector<Tensors> own(1, out);
      return std::vector{g->allgather(own, in, options)};
    });
  }
  WorkPtr gather(std::vector<Tensors>& lists, Tensors& t, const c10d::GatherOptions& options) override {
    return run(lists.empty() ? Tensors{} : lists[0], t, [g = gloo, options](Tensors& out, Tensors& in) {
      std::vector<Tensors> own(out.empty() ? 0 : 1, out);
      return std::vector{g->gather(own, in, options)};
    });
  }
  WorkPtr scatter(Tensors& t, std::vector<Tensors>& lists, const c10d::ScatterOptions& options) override {
    return run(t, lists.empty() ? Tensors{} : lists[0], [g = gloo, options](Tensors& out, Tensors& in) {
      std::vector<Tensors> own(in.empty() ? 0 : 1, in);
      return std::vector{g->scatter(out, own, options)};
    });
  }
  WorkPtr all_gather_single_coalesced(
      Tensors& outs, Tensors& ins, const c10d::AllgatherOptions& options) override {
    return run(outs, ins, [g = gloo, options](Tensors& out, Tensors& in) {
      std::vector<WorkPtr> works;
      for (size_t i = 0; i < out.size(); ++i) {
        // gloo splits the first dimension, others the numbers
        Tensor to = out[i].view(-1), from = in[i].view(-1);
        works.push_back(g->_allgather_base(to, from, options));
      }
      return works;
    });
  }
  WorkPtr all_gather_single(Tensor& out, Tensor& in, const c10d::AllgatherOptions& options) override {
    Tensors outs{out}, ins{in};
    return all_gather_single_coalesced(outs, ins, options);
  }
  WorkPtr reduce_scatter_single_coalesced(
      Tensors& outs, Tensors& ins, const c10d::ReduceScatterOptions& options) override {
    auto own = options;
    int divisor = divisor_of(own);
    auto begin = [g = gloo, own](Tensors& out, Tensors& in) {
      std::vector<WorkPtr> works;
      for (size_t i = 0; i < out.size(); ++i) {
        Tensor to = out[i].view(-1), from = in[i].view(-1);
        works.push_back(g->_reduce_scatter_base(to, from, own));
      }
      return works;
    };
    return run(outs, ins, begin, divisor);
  }
  WorkPtr reduce_scatter_single(Tensor& out, Tensor& in, const c10d::ReduceScatterOptions& options) override {
    Tensors outs{out}, ins{in};
    return reduce_scatter_single_coalesced(outs, ins, options);
  }
  WorkPtr all_to_all_single(
      Tensor& to, Tensor& from, std::vector<int64_t>& to_sizes, std::vector<int64_t>& from_sizes,
      const c10d::AllToAllOptions& options) override {
    return run({to}, {from}, [g = gloo, to_sizes, from_sizes, options](Tensors& out, Tensors& in) mutable {
      return std::vector{g->alltoall_base(out[0], in[0], to_sizes, from_sizes, options)};
    });
  }
  WorkPtr send(Tensors& t, int to, int tag) override {
    return run({}, t, [g = gloo, to, tag](Tensors&, Tensors& in) { return std::vector{g->send(in, to, tag)}; });
  }
  WorkPtr recv(Tensors& t, int from, int tag) override {
    return run(t, {}, [g = gloo, from, tag](Tensors& out, Tensors&) {
      return std::vector{g->recv(out, from, tag)};
    });
  }
  WorkPtr barrier(const c10d::BarrierOptions& options) override { // stops the host, NCCL's too
    auto device = Device(KIND, options.device_ids.empty() ? current : options.device_ids[0]);
    Tensors none{at::empty({1}, at::TensorOptions(device))};
    auto work = run(none, {}, [g = gloo, options](Tensors&, Tensors&) {
      return std::vector{g->barrier(options)};
    });
    host_waits("barrier");
    engine().stop_until(static_cast<Work*>(work.get())->end);
    return work;
  }
};
} // namespace sim
