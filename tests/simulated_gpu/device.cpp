// A CUDA device made of host memory and CPU kernels, for a PyTorch that was built without CUDA.
//
// Tensors have device type "cuda", memory comes from a caching allocator with the rules of CUDA's, operations run by
// the kernels of the CPU on that memory, the backward pass runs in a thread of the device's own, and random numbers
// come from a generator with a seed and an offset. What it can't show: the kernels of a GPU, the memory that they take
// inside, and work that goes on while the host runs ahead; but for copies between host and device in streams of their
// own, which run as late as they may. Where asked for, what a GPU adds in any order has other last bits in each call.
#include <torch/extension.h>

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/Dispatch.h>
#include <ATen/InferSize.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <ATen/native/transformers/attention.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include <atomic>
#include <cmath>
#include <cstdlib>
#include <deque>
#include <map>
#include <mutex>
#include <set>

namespace {

using c10::Device;
using c10::DeviceIndex;
using c10::DeviceType;
using c10::Stream;

constexpr size_t kMiB = 1 << 20;
const Device kDevice{DeviceType::CUDA, 0};

// ---- memory: blocks of 512 bytes, split from segments of 2 MiB, 20 MiB, or as large as asked ----

struct Block {
  char* begin;
  size_t size;
  bool used;
  bool small;
  char* segment;
};

using Event = std::tuple<bool, size_t, size_t>;  // whether it is given out, its address, its size

class CachingAllocator final : public c10::Allocator {
 public:
  c10::DataPtr allocate(size_t n) override {
    if (n == 0) return {nullptr, nullptr, &release, kDevice};
    std::lock_guard<std::mutex> lock(mutex_);
    char* begin = take(std::max<size_t>(512, (n + 511) / 512 * 512));
    return {begin, begin, &release, kDevice};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void* to, const void* from, size_t n) const override { std::memcpy(to, from, n); }

  std::vector<size_t> statistics() {
    std::lock_guard<std::mutex> lock(mutex_);
    return {allocated_, peak_, reserved_, reserved_peak_, times_out_of_memory_};
  }
  void reset_peak() {
    std::lock_guard<std::mutex> lock(mutex_);
    peak_ = allocated_;
    reserved_peak_ = reserved_;
  }
  void set_capacity(size_t n) { capacity_ = n; }
  void record_events(bool on) {
    std::lock_guard<std::mutex> lock(mutex_);
    recording_ = on;
    if (on) events_.clear();
  }
  std::vector<Event> events() {
    std::lock_guard<std::mutex> lock(mutex_);
    return events_;
  }
  void empty_cache() {
    std::lock_guard<std::mutex> lock(mutex_);
    give_back_segments();
  }

 private:
  char* take(size_t size) {
    const bool small = size <= kMiB;
    auto found = best_fit(size, small);
    if (found == blocks_.end()) {
      const size_t whole = (size + 2 * kMiB - 1) / (2 * kMiB) * (2 * kMiB);
      const size_t segment = small ? 2 * kMiB : size < 10 * kMiB ? 20 * kMiB : whole;
      if (reserved_ + segment > capacity_) give_back_segments();
      times_out_of_memory_ += reserved_ + segment > capacity_;
      TORCH_CHECK_WITH(OutOfMemoryError, reserved_ + segment <= capacity_, "CUDA out of memory. Tried to allocate ",
                       size, " bytes. (simulated)");
      char* memory = static_cast<char*>(std::aligned_alloc(512, segment));
      reserved_ += segment;
      reserved_peak_ = std::max(reserved_peak_, reserved_);
      found = blocks_.emplace(memory, Block{memory, segment, false, small, memory}).first;
    }
    Block& block = found->second;
    const size_t rest = block.size - size;
    if (small ? rest >= 512 : rest > kMiB) {
      blocks_.emplace(block.begin + size, Block{block.begin + size, rest, false, small, block.segment});
      block.size = size;
    }
    block.used = true;
    allocated_ += block.size;
    if (recording_) events_.emplace_back(true, reinterpret_cast<size_t>(block.begin), block.size);
    peak_ = std::max(peak_, allocated_);
    return block.begin;
  }
  std::map<char*, Block>::iterator best_fit(size_t size, bool small) {
    auto best = blocks_.end();
    for (auto it = blocks_.begin(); it != blocks_.end(); ++it) {
      const Block& block = it->second;
      if (!block.used && block.small == small && block.size >= size &&
          (best == blocks_.end() || block.size < best->second.size))
        best = it;
    }
    return best;
  }
  static void release(void* begin);
  void give(char* begin) {
    std::lock_guard<std::mutex> lock(mutex_);
    auto it = blocks_.find(begin);
    it->second.used = false;
    allocated_ -= it->second.size;
    if (recording_) events_.emplace_back(false, reinterpret_cast<size_t>(begin), it->second.size);
    std::memset(begin, 0xCD, std::min<size_t>(it->second.size, 4096));  // what reads freed memory shall show it
    auto next = std::next(it);
    if (next != blocks_.end() && !next->second.used && next->second.segment == it->second.segment) {
      it->second.size += next->second.size;
      blocks_.erase(next);
    }
    if (it != blocks_.begin()) {
      auto before = std::prev(it);
      if (!before->second.used && before->second.segment == it->second.segment) {
        before->second.size += it->second.size;
        blocks_.erase(it);
      }
    }
  }
  void give_back_segments() {
    for (auto it = blocks_.begin(); it != blocks_.end();) {
      auto next = std::next(it);
      const bool whole = it->second.begin == it->second.segment && !it->second.used &&
                         (next == blocks_.end() || next->second.segment != it->second.segment);
      if (whole) {
        reserved_ -= it->second.size;
        std::free(it->second.begin);
        blocks_.erase(it);
      }
      it = next;
    }
  }

  std::mutex mutex_;
  std::map<char*, Block> blocks_;
  size_t allocated_ = 0, peak_ = 0, reserved_ = 0, reserved_peak_ = 0, times_out_of_memory_ = 0;
  size_t capacity_ = 8192 * kMiB;
  bool recording_ = false;
  std::vector<Event> events_;
};

CachingAllocator& allocator() {
  static auto* it = new CachingAllocator;  // outlives all tensors
  return *it;
}
void CachingAllocator::release(void* begin) {
  if (begin != nullptr) allocator().give(static_cast<char*>(begin));
}

// ---- the device: one, with streams that are numbers ----

thread_local int64_t current_stream = 0;

// What is computed is done before the next operation begins, in any stream. Copies between host and device that need not
// block the host wait in a stream other than the default one, 0, until some other work waits for that stream: so what
// is read too early is not there yet, and what is freed too early is no longer what was to be copied.
class LateCopies {
 public:
  void add(char* to, const char* from, size_t n) {
    std::lock_guard<std::mutex> lock(mutex_);
    Queue& queue = queues_[current_stream];
    TORCH_CHECK(queue.ordered_after == computed_, "A copy in stream ", current_stream,
                " does not wait for what was computed before it (simulated)");
    queue.items.push_back({to, from, n, 0, 0});
    ++queue.asked;
  }
  void computed() {
    std::lock_guard<std::mutex> lock(mutex_);
    if (current_stream == 0)
      ++computed_;
    else
      run(current_stream, queues_[current_stream].asked);
  }
  size_t record(int64_t stream) {
    std::lock_guard<std::mutex> lock(mutex_);
    return queues_[stream].asked;
  }
  void wait(int64_t by, int64_t stream, size_t asked) {  // let one stream wait for what another was asked for
    std::lock_guard<std::mutex> lock(mutex_);
    if (by == 0) run(stream, asked);
    Queue& queue = queues_[by];
    if (stream == 0)
      queue.ordered_after = computed_;
    else if (by != 0 && by != stream) {
      queue.items.push_back({nullptr, nullptr, 0, stream, asked});
      ++queue.asked;
    }
  }
  void finish() {
    std::lock_guard<std::mutex> lock(mutex_);
    for (auto& [stream, queue] : queues_) run(stream, queue.asked);
  }

 private:
  struct Item {  // a copy, or a wait for another stream
    char* to;
    const char* from;
    size_t n;
    int64_t stream;
    size_t asked;
  };
  struct Queue {
    std::deque<Item> items;
    size_t asked = 0, done = 0, ordered_after = 0;
  };
  void run(int64_t stream, size_t asked) {
    Queue& queue = queues_[stream];
    while (queue.done < asked) {
      const Item item = queue.items.front();
      queue.items.pop_front();
      ++queue.done;
      if (item.to == nullptr)
        run(item.stream, item.asked);
      else
        std::memcpy(item.to, item.from, item.n);
    }
  }

  std::mutex mutex_;
  std::map<int64_t, Queue> queues_;
  size_t computed_ = 0;  // operations in the default stream
};

LateCopies& late_copies() {
  static auto* it = new LateCopies;
  return *it;
}

struct GuardImpl final : c10::impl::DeviceGuardImplInterface {
  DeviceType type() const override { return DeviceType::CUDA; }
  Device exchangeDevice(Device) const override { return kDevice; }
  Device getDevice() const override { return kDevice; }
  void setDevice(Device device) const override { TORCH_CHECK(device.index() <= 0, "invalid device ordinal"); }
  void uncheckedSetDevice(Device) const noexcept override {}
  Stream getStream(Device) const override { return Stream(Stream::UNSAFE, kDevice, current_stream); }
  Stream getDefaultStream(Device) const override { return Stream(Stream::DEFAULT, kDevice); }
  Stream exchangeStream(Stream stream) const override {
    return Stream(Stream::UNSAFE, kDevice, std::exchange(current_stream, stream.id()));
  }
  DeviceIndex deviceCount() const noexcept override { return 1; }
  void record(void** event, const Stream&, const DeviceIndex, const c10::EventFlag) const override {
    static int any;
    *event = &any;
  }
  void block(void*, const Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
  void destroyEvent(void*, const DeviceIndex) const noexcept override {}
  bool queryStream(const Stream&) const override { return true; }
  void synchronizeStream(const Stream&) const override {}
  void synchronizeEvent(void*) const override {}
  void synchronizeDevice(const DeviceIndex) const override {}
  void recordDataPtrOnStream(const c10::DataPtr&, const Stream&) const override {}
};
C10_REGISTER_GUARD_IMPL(CUDA, GuardImpl)

// ---- random numbers: of a seed and an offset, as those of the device are ----

struct DeviceGenerator final : c10::GeneratorImpl {
  DeviceGenerator() : c10::GeneratorImpl(kDevice, c10::DispatchKeySet(c10::DispatchKey::CUDA)) {}
  void set_current_seed(uint64_t seed) override {
    seed_ = seed;
    offset_ = 0;
  }
  void set_offset(uint64_t offset) override { offset_ = offset; }
  uint64_t get_offset() const override { return offset_; }
  uint64_t current_seed() const override { return seed_; }
  uint64_t seed() override {
    set_current_seed(c10::detail::getNonDeterministicRandom(true));
    return seed_;
  }
  void set_state(const c10::TensorImpl& state) override {
    TORCH_CHECK(state.numel() == 16 && state.device().is_cpu(), "RNG state is wrong size");
    const auto* words = static_cast<const uint64_t*>(state.data());
    seed_ = words[0];
    offset_ = words[1];
  }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override {
    auto state = at::detail::empty_cpu({16}, at::kByte, c10::nullopt, c10::nullopt, c10::nullopt, c10::nullopt);
    auto* words = static_cast<uint64_t*>(state.data_ptr());
    words[0] = seed_;
    words[1] = offset_;
    return state.getIntrusivePtr();
  }
  DeviceGenerator* clone_impl() const override {
    auto* copy = new DeviceGenerator;
    copy->seed_ = seed_;
    copy->offset_ = offset_;
    return copy;
  }
  at::Generator next() {  // the host's generator for one operation
    const uint64_t mixed = (seed_ ^ (offset_ * 0x9E3779B97F4A7C15ull)) * 0xBF58476D1CE4E5B9ull;
    offset_ += 4;
    return at::detail::createCPUGenerator(mixed ^ (mixed >> 31));
  }
  static DeviceType device_type() { return DeviceType::CUDA; }
  uint64_t seed_ = c10::default_rng_seed_val, offset_ = 0;
};

const at::Generator& default_generator() {
  static auto* it = new at::Generator(at::make_generator<DeviceGenerator>());
  return *it;
}

at::Generator on_host(const std::optional<at::Generator>& asked) {
  const bool is_own = asked.has_value() && asked->defined() && asked->device().is_cuda();
  at::Generator generator = is_own ? *asked : default_generator();
  std::lock_guard<std::mutex> lock(generator.mutex());
  return static_cast<DeviceGenerator*>(generator.unsafeGetGeneratorImpl())->next();
}

struct CUDAHooks final : at::CUDAHooksInterface {
  explicit CUDAHooks(at::CUDAHooksArgs) {}
  void init() const override {}
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasCUDA() const override { return true; }
  bool hasCuDNN() const override { return true; }
  bool compiledWithCuDNN() const override { return true; }
  bool supportsDilatedConvolutionWithCuDNN() const override { return true; }
  bool supportsDepthwiseConvolutionWithCuDNN() const override { return true; }
  bool supportsBFloat16ConvolutionWithCuDNNv8() const override { return true; }
  long versionCuDNN() const override { return 91000; }
  long versionRuntimeCuDNN() const override { return 91000; }
  double batchnormMinEpsilonCuDNN() const override { return 0.0; }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  DeviceIndex deviceCount() const override { return 1; }
  int getNumGPUs() const override { return 1; }
  DeviceIndex current_device() const override { return 0; }
  DeviceIndex getCurrentDevice() const override { return 0; }
  void setCurrentDevice(DeviceIndex) const override {}
  DeviceIndex exchangeDevice(DeviceIndex) const override { return 0; }
  DeviceIndex maybeExchangeDevice(DeviceIndex) const override { return 0; }
  void deviceSynchronize(DeviceIndex) const override {}
  const at::Generator& getDefaultGenerator(DeviceIndex) const override { return default_generator(); }
  at::Generator getNewGenerator(DeviceIndex) const override { return at::make_generator<DeviceGenerator>(); }
  Device getDeviceFromPtr(void*) const override { return kDevice; }
  c10::Allocator* getPinnedMemoryAllocator() const override { return c10::GetAllocator(DeviceType::CPU); }
  c10::Allocator* getCUDADeviceAllocator() const override { return &allocator(); }
};
using at::CUDAHooksRegistry;
using at::CUDAHooksArgs;
using at::RegistererCUDAHooksRegistry;
REGISTER_CUDA_HOOKS(CUDAHooks)

// ---- sums whose terms a GPU adds in any order: other last bits in each call ----

constexpr uint64_t kMix = 0xBF58476D1CE4E5B9ull;
uint64_t mixed(uint64_t bits) {
  bits = (bits ^ (bits >> 30)) * kMix;
  return (bits ^ (bits >> 27)) * 0x94D049BB133111EBull;
}

class Orders {
 public:
  void fix() { any_ = false; }
  void any(uint64_t seed, bool in_each_call) {
    any_ = true;
    seed_ = seed;
    in_each_call_ = in_each_call;
  }
  // What of a call's results is a sum in any order: bit i for result i, 0 for none. Deterministic algorithms have none.
  uint64_t results_of(const std::string& name, const torch::jit::Stack& stack, size_t arguments) const {
    if (!any_ || at::globalContext().deterministicAlgorithms()) return 0;
    const bool convolves = name == "aten::convolution_backward";
    if (convolves) return at::globalContext().deterministicCuDNN() ? 0 : 0b110;  // of weights and biases
    static const std::set<std::string> sums = {
        "aten::sum", "aten::mean", "aten::cumsum", "aten::embedding_dense_backward", "aten::avg_pool2d_backward",
        "aten::_adaptive_avg_pool2d_backward", "aten::max_pool2d_with_indices_backward",
        "aten::upsample_nearest2d_backward", "aten::upsample_bilinear2d_backward",
        "aten::upsample_bicubic2d_backward", "aten::grid_sampler_2d_backward", "aten::reflection_pad2d_backward",
        "aten::replication_pad2d_backward"};
    return sums.count(name) > 0 || adds_to_self(name, stack, arguments) ? 1 : 0;
  }
  static bool adds_to_self(const std::string& name, const torch::jit::Stack& stack, size_t arguments) {
    static const std::set<std::string> adding = {"aten::index_add", "aten::index_add_", "aten::scatter_add",
                                                 "aten::scatter_add_", "aten::scatter_reduce",
                                                 "aten::scatter_reduce_"};
    static const std::set<std::string> asked = {"aten::index_put", "aten::index_put_", "aten::_index_put_impl_",
                                                "aten::_unsafe_index_put"};
    return adding.count(name) > 0 || (asked.count(name) > 0 && torch::jit::peek(stack, 3, arguments).toBool());
  }
  // Change last bits. Sums of whole numbers are the same in any order, and so is what nothing was added to.
  void reorder(const at::Tensor& sum, const at::Tensor& before = at::Tensor()) {
    if (!any_ || !sum.defined() || !sum.is_floating_point() || sum.numel() == 0) return;
    const at::Tensor flat = sum.contiguous();
    const at::Tensor old = before.defined() ? before.contiguous() : before;
    const uint64_t seed = in_each_call_ ? mixed(seed_ + kMix * ++calls_) : mixed(seed_);
    AT_DISPATCH_FLOATING_TYPES_AND2(at::kHalf, at::kBFloat16, flat.scalar_type(), "reorder", [&] {
      using Bits = std::conditional_t<sizeof(scalar_t) == 8, uint64_t,
                                      std::conditional_t<sizeof(scalar_t) == 4, uint32_t, uint16_t>>;
      scalar_t* values = flat.mutable_data_ptr<scalar_t>();
      const scalar_t* olds = old.defined() ? old.const_data_ptr<scalar_t>() : nullptr;
      for (int64_t i = 0; i < flat.numel(); ++i) {
        const double value = static_cast<double>(values[i]);
        if (!std::isfinite(value) || value == std::floor(value) || (olds != nullptr && olds[i] == values[i])) continue;
        Bits bits;
        std::memcpy(&bits, values + i, sizeof bits);
        bits ^= static_cast<Bits>(mixed(seed ^ (bits + kMix * i)) >> 63);  // as the bits ask for where calls are alike
        std::memcpy(values + i, &bits, sizeof bits);
      }
    });
    if (!flat.is_same(sum)) sum.copy_(flat);
  }

 private:
  bool any_ = false, in_each_call_ = true;
  uint64_t seed_ = 0;
  std::atomic<uint64_t> calls_ = 0;
};

Orders& orders() {
  static auto* it = new Orders;
  return *it;
}

// ---- operations: the kernels of the CPU, on the same memory ----

using OptionalTensor = std::optional<at::Tensor>;

at::Tensor new_tensor(c10::IntArrayRef sizes, c10::IntArrayRef strides, at::ScalarType type) {
  const c10::DispatchKeySet keys(c10::DispatchKey::CUDA);
  return at::detail::empty_strided_generic(sizes, strides, &allocator(), keys, type);
}
at::Tensor host(const at::Tensor& tensor) {  // the same memory, as the host sees it
  const auto options = at::TensorOptions().dtype(tensor.dtype());
  const auto keep = [](void*) {};
  return at::from_blob(tensor.data_ptr(), tensor.sizes(), tensor.strides(), keep, options, at::Device(at::kCPU));
}
OptionalTensor host(const OptionalTensor& tensor) {
  return tensor.has_value() && tensor->defined() ? OptionalTensor(host(*tensor)) : std::nullopt;
}
at::Tensor device(const at::Tensor& tensor) {  // a copy on the device
  at::Tensor result = new_tensor(tensor.sizes(), tensor.strides(), tensor.scalar_type());
  const size_t bytes = std::min(result.storage().nbytes(), tensor.storage().nbytes());
  if (tensor.numel() > 0) std::memcpy(result.mutable_data_ptr(), tensor.data_ptr(), bytes);
  return result;
}
at::Tensor view_of(const at::Tensor& base, c10::IntArrayRef sizes, c10::IntArrayRef strides, int64_t offset,
                   caffe2::TypeMeta type) {
  auto view = at::detail::make_tensor<c10::TensorImpl>(
      c10::TensorImpl::VIEW, c10::Storage(base.storage()), base.key_set(), type);
  view.unsafeGetTensorImpl()->set_sizes_and_strides(sizes, strides, offset);
  return view;
}

class HostCall {  // one call of an operation, with its arguments as the host sees them
 public:
  explicit HostCall(const c10::OperatorHandle& op) : op_(op), name_(op.schema().name()) {}

  void run(torch::jit::Stack* stack) {
    const auto& arguments = op_.schema().arguments();
    const size_t first = stack->size() - arguments.size();
    for (size_t i = 0; i < arguments.size(); ++i) {
      (*stack)[first + i] = to_host((*stack)[first + i], arguments[i]);
    }
    check_devices();
    const uint64_t reordered = orders().results_of(name_, *stack, arguments.size());
    at::Tensor before;
    if (reordered && Orders::adds_to_self(name_, *stack, arguments.size())) before = (*stack)[first].toTensor().clone();
    op_.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), stack);
    const size_t results = op_.schema().returns().size();
    for (size_t i = 0; i < results; ++i)
      if (reordered >> i & 1) orders().reorder((*stack)[stack->size() - results + i].toTensor(), before);
    for (size_t i = stack->size() - results; i < stack->size(); ++i) (*stack)[i] = to_device((*stack)[i]);
    for (auto& [device, host] : resized_) give_back_resized(device, host);
  }

 private:
  c10::IValue to_host(const c10::IValue& value, const c10::Argument& argument) {
    if (value.isTensor()) return to_host(value.toTensor(), argument);
    if (value.isTensorList()) {
      c10::List<at::Tensor> list;
      for (const at::Tensor& tensor : value.toTensorVector()) list.push_back(to_host(tensor, argument));
      return list;
    }
    if (value.isOptionalTensorList()) {
      c10::List<std::optional<at::Tensor>> list;
      for (const std::optional<at::Tensor>& tensor : value.toOptionalTensorList())
        list.push_back(tensor.has_value() ? std::optional<at::Tensor>(to_host(*tensor, argument)) : std::nullopt);
      return list;
    }
    if (value.isDevice()) return value.toDevice().is_cuda() ? c10::IValue(Device(DeviceType::CPU)) : value;
    if (argument.type()->str().find("Generator") != std::string::npos) {
      return on_host(value.isNone() ? std::nullopt : std::optional<at::Generator>(value.toGenerator()));
    }
    return value;
  }

  at::Tensor to_host(const at::Tensor& tensor, const c10::Argument& argument) {
    if (!tensor.defined()) return tensor;
    if (!tensor.is_cuda()) {
      has_other_ = has_other_ || tensor.dim() > 0;
      others_.push_back(tensor);
      return tensor;
    }
    has_own_ = true;
    const bool written = argument.alias_info() != nullptr && argument.alias_info()->isWrite();
    const bool resized = written && tensor.numel() == 0;
    at::Tensor seen = resized ? at::empty(tensor.sizes(), at::TensorOptions().dtype(tensor.dtype())) : host(tensor);
    if (resized) resized_.emplace_back(tensor, seen);
    pairs_.emplace_back(tensor, seen);
    return seen;
  }

  void check_devices() const {  // as on a device: what a kernel reads must be there
    static const std::set<std::string> mixed = {
        "aten::index", "aten::_index_put_impl_", "aten::index_put_", "aten::index_put", "aten::copy_"};
    TORCH_CHECK(!has_own_ || !has_other_ || mixed.count(name_), "Expected all tensors to be on the same device, but ",
                "found at least two devices, cuda:0 and cpu! (", name_, ")");
  }

  c10::IValue to_device(const c10::IValue& value) {
    if (value.isTensor()) return to_device(value.toTensor());
    if (value.isTensorList()) {
      c10::List<at::Tensor> list;
      for (const at::Tensor& tensor : value.toTensorVector()) list.push_back(to_device(tensor));
      return list;
    }
    return value;
  }

  at::Tensor to_device(const at::Tensor& tensor) {
    if (!tensor.defined()) return tensor;
    for (const at::Tensor& other : others_)  // what is copied to the host is returned there
      if (tensor.is_same(other)) return tensor;
    for (auto& [device, host] : pairs_)
      if (tensor.is_same(host)) return device;
    for (auto& [device, host] : pairs_) {
      if (tensor.numel() == 0 || tensor.storage().data() != host.storage().data()) continue;
      const auto base = device.storage_offset() * device.element_size() / tensor.element_size();
      return view_of(device, tensor.sizes(), tensor.strides(), base + tensor.storage_offset(), tensor.dtype());
    }
    return ::device(tensor);
  }

  static void give_back_resized(at::Tensor& device, const at::Tensor& host) {
    if (host.numel() == 0) {
      device.unsafeGetTensorImpl()->set_sizes_and_strides(host.sizes(), host.strides());
      return;
    }
    device.resize_(host.sizes());
    device.copy_(host);
  }

  const c10::OperatorHandle& op_;
  const std::string name_;
  std::vector<std::pair<at::Tensor, at::Tensor>> pairs_, resized_;
  std::vector<at::Tensor> others_;
  bool has_own_ = false, has_other_ = false;
};

bool is_late(const c10::OperatorHandle& op, const torch::jit::Stack& stack) {
  if (current_stream == 0 || op.schema().name() != "aten::copy_") return false;
  const at::Tensor& to = torch::jit::peek(stack, 0, 3).toTensor();
  const at::Tensor& from = torch::jit::peek(stack, 1, 3).toTensor();
  const bool is_alike = to.scalar_type() == from.scalar_type() && to.sizes() == from.sizes();
  return torch::jit::peek(stack, 2, 3).toBool() && to.is_cuda() != from.is_cuda() && is_alike &&
         to.is_contiguous() && from.is_contiguous();
}

void on_cpu(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  if (is_late(op, *stack)) {
    const at::Tensor to = torch::jit::peek(*stack, 0, 3).toTensor();
    const at::Tensor from = torch::jit::peek(*stack, 1, 3).toTensor();
    late_copies().add(static_cast<char*>(to.data_ptr()), static_cast<const char*>(from.data_ptr()), to.nbytes());
    torch::jit::drop(*stack, 3);
    torch::jit::push(*stack, to);
    return;
  }
  late_copies().computed();
  HostCall(op).run(stack);
}

// ---- operations that no kernel of the CPU does, or does otherwise ----

at::Tensor device_empty(c10::IntArrayRef sizes, std::optional<at::ScalarType> type, std::optional<at::Layout>,
                        std::optional<Device>, std::optional<bool>, std::optional<at::MemoryFormat> format) {
  const c10::DispatchKeySet keys(c10::DispatchKey::CUDA);
  return at::detail::empty_generic(sizes, &allocator(), keys, at::dtype_or_default(type), format);
}
at::Tensor device_empty_strided(c10::IntArrayRef sizes, c10::IntArrayRef strides, std::optional<at::ScalarType> type,
                                std::optional<at::Layout>, std::optional<Device>, std::optional<bool>) {
  return new_tensor(sizes, strides, at::dtype_or_default(type));
}
at::Tensor strided_view(const at::Tensor& self, c10::IntArrayRef sizes, c10::IntArrayRef strides,
                        std::optional<int64_t> offset) {
  return view_of(self, sizes, strides, offset.value_or(self.storage_offset()), self.dtype());
}
at::Tensor device_view(const at::Tensor& self, c10::IntArrayRef asked) {
  const auto sizes = at::infer_size_dv(asked, self.numel());
  const auto strides = at::detail::computeStride(self.sizes(), self.strides(), sizes);
  TORCH_CHECK(strides.has_value(), "view size is not compatible with input tensor's size and stride");
  return strided_view(self, sizes, *strides, std::nullopt);
}
at::Tensor reshape_alias(const at::Tensor& self, c10::IntArrayRef sizes, c10::IntArrayRef strides) {
  return strided_view(self, sizes, strides, std::nullopt);
}
const at::Tensor& resize_(const at::Tensor& self, c10::IntArrayRef sizes, std::optional<at::MemoryFormat> format) {
  auto* impl = self.unsafeGetTensorImpl();
  impl->set_sizes_contiguous(sizes);
  const size_t needed = (impl->numel() + impl->storage_offset()) * self.element_size();
  if (needed > self.storage().nbytes()) {
    c10::DataPtr memory = allocator().allocate(needed);
    if (self.storage().nbytes() > 0) std::memcpy(memory.get(), self.storage().data(), self.storage().nbytes());
    self.storage().set_data_ptr_noswap(std::move(memory));
    self.storage().set_nbytes(needed);
  }
  if (format.has_value()) impl->empty_tensor_restride(*format);
  return self;
}
void resize_storage(const at::Tensor& on, size_t size) {
  at::Storage storage = on.storage();
  c10::DataPtr memory = allocator().allocate(size);
  const size_t kept = std::min(size, storage.nbytes());
  if (kept > 0) std::memcpy(memory.get(), storage.data(), kept);
  storage.set_data_ptr_noswap(std::move(memory));
  storage.set_nbytes(size);
}
at::Tensor& set_storage(at::Tensor& self, at::Storage source, int64_t offset, c10::IntArrayRef sizes,
                        c10::IntArrayRef strides) {
  self.unsafeGetTensorImpl()->set_storage_keep_dtype(std::move(source));
  self.unsafeGetTensorImpl()->set_sizes_and_strides(sizes, strides, offset);
  return self;
}
at::Tensor& set_whole_storage(at::Tensor& self, at::Storage source) {
  const int64_t count = source.nbytes() / self.element_size();
  return set_storage(self, std::move(source), 0, {count}, {1});
}
at::Tensor& set_tensor(at::Tensor& self, const at::Tensor& source) {
  return set_storage(self, source.storage(), source.storage_offset(), source.sizes(), source.strides());
}
at::Tensor& set_nothing(at::Tensor& self) {
  return set_storage(self, c10::Storage(c10::Storage::use_byte_size_t(), 0, &allocator(), true), 0, {0}, {1});
}

at::Tensor masked_scale(const at::Tensor& source, const at::Tensor& mask, double scale) {
  const auto type = source.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;  // what its kernel computes in
  return source.to(type).mul(mask).mul_(scale).to(source.scalar_type());
}
std::tuple<at::Tensor, at::Tensor> native_dropout(const at::Tensor& input, double p, std::optional<bool> train) {
  const auto boolean = input.options().dtype(at::kBool);
  if (input.numel() == 0 || !train.value_or(true)) return {input.clone(), at::ones_like(input, boolean)};
  at::Tensor mask = at::empty_like(input, boolean).bernoulli_(1 - p);
  const double rounded = float(1.0 / float(1.0 - p));  // as its kernel rounds
  const double scale = input.scalar_type() == at::kDouble ? 1.0 / (1.0 - p) : rounded;
  return {masked_scale(input, mask, p == 1 ? 0.0 : scale), mask};
}
at::Tensor native_dropout_backward(const at::Tensor& gradient, const at::Tensor& mask, double scale) {
  return masked_scale(gradient, mask, scale);
}
void record_stream(at::Tensor&, Stream) {}

constexpr int64_t kMath = 0, kFlash = 1;
int64_t choose_attention(const at::Tensor& query, const at::Tensor&, const at::Tensor&, const OptionalTensor& mask,
                         double dropout, bool, std::optional<double>, bool) {
  const bool is_half = query.scalar_type() == at::kHalf || query.scalar_type() == at::kBFloat16;
  return is_half && query.dim() == 4 && !mask.has_value() && dropout == 0.0 ? kFlash : kMath;
}

using Flash = std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor, c10::SymInt, c10::SymInt, at::Tensor,
                         at::Tensor, at::Tensor>;
Flash flash(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, double, bool causal, bool,
            std::optional<double> scale) {
  auto [out, logarithms] = at::_scaled_dot_product_flash_attention_for_cpu(
      host(q), host(k), host(v), 0.0, causal, std::nullopt, scale);
  const auto words = q.options().dtype(at::kUInt64);
  return {device(out), device(logarithms), at::Tensor(), at::Tensor(), q.size(2), k.size(2),
          at::empty({2}, words).zero_(), at::empty({}, words).zero_(), at::empty({0}, q.options())};
}
std::tuple<at::Tensor, at::Tensor, at::Tensor> flash_backward(
    const at::Tensor& gradient, const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, const at::Tensor& out,
    const at::Tensor& logarithms, const at::Tensor&, const at::Tensor&, c10::SymInt, c10::SymInt, double, bool causal,
    const at::Tensor&, const at::Tensor&, std::optional<double> scale) {
  auto [a, b, c] = at::_scaled_dot_product_flash_attention_for_cpu_backward(
      host(gradient), host(q), host(k), host(v), host(out), host(logarithms), 0.0, causal, std::nullopt, scale);
  if (!at::globalContext().deterministicAlgorithms())
    for (const at::Tensor& sum : {a, b, c}) orders().reorder(sum);
  return {device(a), device(b), device(c)};
}

std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor> batch_norm(
    const at::Tensor& x, const at::Tensor& weight, const OptionalTensor& bias, const OptionalTensor& mean,
    const OptionalTensor& variance, bool training, double factor, double epsilon) {
  auto [y, saved_mean, saved_inverse] = at::native_batch_norm(
      host(x), host(weight), host(bias), host(mean), host(variance), training, factor, epsilon);
  return {device(y), device(saved_mean), device(saved_inverse), at::empty({0}, x.options().dtype(at::kByte))};
}
std::tuple<at::Tensor, at::Tensor, at::Tensor> batch_norm_backward(
    const at::Tensor& x, const at::Tensor& gradient, const at::Tensor& weight, const OptionalTensor& mean,
    const OptionalTensor& variance, const OptionalTensor& saved_mean, const OptionalTensor& saved_inverse,
    double epsilon, const at::Tensor&) {
  auto [a, b, c] = at::native_batch_norm_backward(
      host(gradient), host(x), host(weight), host(mean), host(variance), host(saved_mean), host(saved_inverse), true,
      epsilon, {true, true, true});
  return {device(a), device(b), device(c)};
}
// the CPU has none for whole numbers
at::Tensor histc(const at::Tensor& self, int64_t bins, const at::Scalar& low, const at::Scalar& high) {
  return device(at::histc(host(self).to(at::kDouble), bins, low, high).to(self.scalar_type()));
}

TORCH_LIBRARY_IMPL(_, CUDA, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&on_cpu>()); }
TORCH_LIBRARY_IMPL(aten, CUDA, m) {
  m.impl("empty.memory_format", &device_empty);
  m.impl("empty_strided", &device_empty_strided);
  m.impl("as_strided", &strided_view);
  m.impl("view", &device_view);
  m.impl("_reshape_alias", &reshape_alias);
  m.impl("resize_", &resize_);
  m.impl("set_.source_Storage", &set_whole_storage);
  m.impl("set_.source_Storage_storage_offset", &set_storage);
  m.impl("set_.source_Tensor", &set_tensor);
  m.impl("set_", &set_nothing);
  m.impl("record_stream", &record_stream);
  m.impl("histc", &histc);
  m.impl("cudnn_batch_norm", &batch_norm);
  m.impl("cudnn_batch_norm_backward", &batch_norm_backward);
  m.impl("native_dropout", &native_dropout);
  m.impl("native_dropout_backward", &native_dropout_backward);
  m.impl("_scaled_dot_product_flash_attention", &flash);
  m.impl("_scaled_dot_product_flash_attention_backward", &flash_backward);
  for (const char* name : {"copy_", "convolution", "_convolution", "convolution_backward", "is_set_to"})
    m.impl(name, torch::CppFunction::makeFromBoxedFunction<&on_cpu>());
}

}  // namespace

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  c10::SetAllocator(DeviceType::CUDA, &allocator());
  at::native::_fused_sdp_choice_stub.set_cuda_dispatch_ptr(&choose_attention);
  m.def("statistics", [] { return allocator().statistics(); });
  m.def("reset_peak", [] { allocator().reset_peak(); });
  m.def("empty_cache", [] { allocator().empty_cache(); });
  m.def("set_capacity", [](size_t n) { allocator().set_capacity(n); });
  m.def("record_events", [](bool on) { allocator().record_events(on); });
  m.def("events", [] { return allocator().events(); });
  m.def("set_stream", [](int64_t stream) { current_stream = stream; });
  m.def("record", [](int64_t stream) { return late_copies().record(stream); });
  m.def("wait", [](int64_t by, int64_t stream, size_t asked) { late_copies().wait(by, stream, asked); });
  m.def("finish", [] { late_copies().finish(); });
  m.def("resize_storage", &resize_storage);
  m.def("add_in_fixed_order", [] { orders().fix(); });
  m.def("add_in_any_order", [](uint64_t seed, bool in_each_call) { orders().any(seed, in_each_call); });
  m.def("default_generator", [] { return default_generator(); });
}
