// Preloaded, this library makes MLX's CPU wheel report a GPU; README.md says why.
//
// MLX does not export the functions that this library replaces or calls. __init__.py
// finds them in the wheel's symbol table, and defines GPU_EVAL, CPU_EVAL and so on as
// their offsets in libmlx.so.
#include <dlfcn.h>
#include <sys/mman.h>
#include <unistd.h>
#include <xmmintrin.h>

#include <algorithm>
#include <cstring>
#include <map>
#include <mutex>
#include <set>
#include <sstream>
#include <stdexcept>
#include <string>
#include <unordered_map>
#include <vector>

#include "mlx/backend/cpu/encoder.h"
#include "mlx/backend/gpu/device_info.h"
#include "mlx/fast_primitives.h"
#include "mlx/ops.h"
#include "mlx/primitives.h"
#include "mlx/scheduler.h"
#include "mlx/utils.h"

namespace mlx::core {

// What default_device() and default_stream() ask; these two are exported.
bool gpu::is_available() { return true; }
int gpu::device_count() { return 1; }

namespace {

constexpr size_t MAX_BUFFERS = 31;     // of a Metal kernel
constexpr size_t ONE_PASS = 4 * 1024;  // elements that Metal reduces in one launch
constexpr int FLUSH_TO_ZERO = 0x8000, DENORMALS_ARE_ZERO = 0x0040;

// These launch a kernel only if their output does not share the input's buffer.
const std::set<std::string> VIEWS = {
    "AsStrided", "Broadcast",    "BroadcastAxes", "Contiguous",
    "Copy",      "Depends",      "ExpandDims",    "CustomTransforms",
    "Flatten",   "Reshape",      "Slice",         "Split",
    "Squeeze",   "StopGradient", "Transpose",     "Unflatten",
    "View"};

char* libmlx;  // where libmlx.so starts in memory
std::mutex mutex;
bool recording = false, compiling = false;
std::string records;  // one line per launch

void* buffer_of(const array& x) {
  return x.data_shared_ptr() ? x.buffer().ptr() : nullptr;
}

// The bytes in memory: a broadcast array is smaller than its shape says.
size_t bytes_of(const array& x) {
  return std::min(x.data_size(), x.size()) * x.itemsize();
}

// A launch as Metal would make it. Inputs are looked at before the primitive runs,
// which may give their buffers to its outputs.
struct Launch {
  std::string name;
  std::ostringstream dtypes;
  size_t buffers = 0, bytes = 0, count = 1, largest_input = 0;
  std::set<const void*> shared;
  std::map<const void*, size_t> read_from;  // bytes by address

  explicit Launch(const Primitive& primitive) : name(primitive.name()) {
    if (typeid(primitive) == typeid(Compiled)) {
      name = "Compiled";
    }
    name = name.substr(0, name.find(' '));  // "View int32"
  }

  void read(const array& x) {
    buffers++;
    dtypes << x.dtype() << ' ';
    if (buffer_of(x) == nullptr) {
      return;
    }
    shared.insert(buffer_of(x));
    // A kernel reads views of the same elements, such as weights and their bits, once.
    auto& known = read_from[x.data<char>()];
    bytes += std::max(bytes_of(x), known) - known;
    known = std::max(bytes_of(x), known);
    largest_input = std::max(largest_input, x.size());
  }

  void write(const Primitive& primitive, const std::vector<array>& outputs) {
    auto& out = outputs[0];
    bool is_view = VIEWS.count(name) && shared.count(buffer_of(out));
    bool is_empty = name != "Compiled" && out.size() == 0;
    if (is_view || is_empty || name == "Synchronize") {
      return;
    }
    dtypes << '\t';
    for (auto& x : outputs) {
      buffers++;
      bytes += bytes_of(x);
      dtypes << ' ' << x.dtype();
    }
    if (name == "Concatenate") {
      count = buffers - 1;
    } else if (typeid(primitive) == typeid(Reduce) && out.size() == 1) {
      count = largest_input > ONE_PASS ? 2 : 1;
    }
    std::ostringstream line;
    line << name << '\t' << count << '\t' << bytes << '\t' << out.size() << '\t'
         << buffers << '\t' << dtypes.str() << '\n';
    std::lock_guard lock(mutex);
    if (recording) {
      records += line.str();
    }
  }
};

void run_on_cpu(array& x) {
  std::vector<array> outputs = {x};
  x.primitive().eval_cpu(x.inputs(), outputs);
}

// The replacements of MLX's own functions, which throw in a wheel without a GPU.

template <typename... Args>
void call_mlx(size_t offset, Args... args) {
  reinterpret_cast<void (*)(Args...)>(libmlx + offset)(args...);
}

void flush_subnormals(Stream stream) {
  scheduler::enqueue(stream, [] {
    _mm_setcsr(_mm_getcsr() | FLUSH_TO_ZERO | DENORMALS_ARE_ZERO);
  });
}

void new_stream(Stream stream) {
  call_mlx(CPU_NEW_STREAM, stream);
  flush_subnormals(stream);
}

void new_thread_unsafe_stream(Stream stream) {
  call_mlx(CPU_NEW_THREAD_UNSAFE_STREAM, stream);
  flush_subnormals(stream);
}

// MLX dequantizes by a primitive of its own only on a GPU, so the CPU backend has none.
struct Dequantize : fast::Custom {
  static bool is(const array& x) {
    return x.primitive().name() == std::string("Quantize") && x.siblings().empty();
  }
  static void run(array& x) {
    auto& fallback = static_cast<fast::Custom&>(x.primitive()).*(&Dequantize::fallback_);
    auto value = fallback(x.inputs())[0];
    value.eval();
    x.copy_shared_buffer(value);
  }
};

void eval(array& x) {
  if (Dequantize::is(x)) {
    return Dequantize::run(x);
  }
  auto primitive = x.primitive_ptr();
  auto outputs = x.outputs();
  Launch launch(*primitive);
  for (auto& input : x.inputs()) {
    launch.read(input);
  }
  call_mlx<array&>(CPU_EVAL, x);
  if (launch.name != "Compiled") {
    launch.write(*primitive, outputs);
  }
}

void finalize(Stream) {}

// Streams of both devices are numbered together, and run in a thread each.
void synchronize(Stream stream) {
  mlx::core::synchronize(Stream(stream.index, Device::cpu));
}

void replace(size_t offset, void* function) {
  char* start = libmlx + offset;
  auto page = reinterpret_cast<uintptr_t>(start) & -sysconf(_SC_PAGESIZE);
  size_t length = start + JUMP_SIZE - reinterpret_cast<char*>(page);
  void* pages = reinterpret_cast<void*>(page);
  if (mprotect(pages, length, PROT_READ | PROT_WRITE | PROT_EXEC)) {
    throw std::runtime_error("The code of libmlx.so cannot be changed.");
  }
  // jmp *0(%rip), followed by the address.
  std::memcpy(start, "\xff\x25\0\0\0\0", 6);
  std::memcpy(start + 6, &function, sizeof function);
}

__attribute__((constructor)) void start() {
  Dl_info info;
  dladdr(reinterpret_cast<void*>(&default_device), &info);
  libmlx = static_cast<char*>(info.dli_fbase);
  replace(GPU_NEW_STREAM, reinterpret_cast<void*>(&new_stream));
  replace(
      GPU_NEW_THREAD_UNSAFE_STREAM, reinterpret_cast<void*>(&new_thread_unsafe_stream));
  replace(GPU_EVAL, reinterpret_cast<void*>(&eval));
  replace(GPU_FINALIZE, reinterpret_cast<void*>(&finalize));
  replace(GPU_SYNCHRONIZE, reinterpret_cast<void*>(&synchronize));
}

}  // namespace

// Replays a fused kernel primitive by primitive, so that nothing is compiled.
void Compiled::eval_cpu(
    const std::vector<array>& inputs, std::vector<array>& outputs) {
  if (compiling) {
    call_mlx<Compiled*, const std::vector<array>&, std::vector<array>&>(
        COMPILED_EVAL_CPU, this, inputs, outputs);
    return;
  }
  Launch launch(*this);
  std::unordered_map<uintptr_t, array> values;  // by the id in the trace
  bool has_strides = false;
  for (size_t i = 0; i < inputs.size(); ++i) {
    values.emplace(inputs_[i].id(), inputs[i]);
    if (!is_constant_(i)) {  // constants are part of the kernel's source
      launch.read(inputs[i]);
      has_strides |= inputs[i].ndim() > 0;
    }
  }
  // MLX generates the kernel for every layout. The one that needs most is for strided
  // arrays of any dimension: it binds strides, shape and number of dimensions too.
  launch.buffers += has_strides + 2;
  if (launch.buffers + outputs.size() > MAX_BUFFERS) {
    throw std::runtime_error(
        "A fused kernel needs " + std::to_string(launch.buffers + outputs.size()) +
        " buffers; Metal has " + std::to_string(MAX_BUFFERS) + ".");
  }
  if (outputs[0].size() == 0 && stream().device == Device::gpu) {
    throw std::runtime_error(
        "A fused kernel is launched for an array without elements. MLX would ask Metal "
        "for a grid of 0 threads.");
  }
  auto broadcast = [&](const array& x, const Shape& shape) {
    auto view = broadcast_to(x, shape, stream());
    if (view.id() != x.id()) {
      run_on_cpu(view);
      view.detach();
    }
    return view;
  };
  for (auto& traced : tape_) {
    std::vector<array> given;
    Shape shape;
    for (auto& input : traced.inputs()) {
      given.push_back(values.at(input.id()));
      shape = broadcast_shapes(shape, given.back().shape());
    }
    if (traced.primitive().name() == std::string("Broadcast")) {
      values.emplace(traced.id(), given[0]);
      continue;
    }
    for (auto& input : given) {
      input = broadcast(input, shape);
    }
    array value(shape, traced.dtype(), traced.primitive_ptr(), std::move(given));
    run_on_cpu(value);
    value.detach();
    values.emplace(traced.id(), value);
  }
  // Only intermediate values are kept until the stream's thread has computed: a
  // reference to an output would keep the next primitive from reusing its buffer.
  auto& encoder = cpu::get_command_encoder(stream());
  for (size_t i = 0; i < outputs.size(); ++i) {
    auto source = broadcast(values.at(outputs_[i].id()), outputs[i].shape());
    auto value = contiguous(source, true, stream());
    run_on_cpu(value);
    outputs[i].copy_shared_buffer(value);
    if (buffer_of(source) != buffer_of(value)) {
      encoder.add_temporary(source);
    }
  }
  for (auto& output : outputs_) {
    values.erase(output.id());
  }
  for (auto& [id, value] : values) {
    encoder.add_temporary(value);
  }
  if (stream().device == Device::gpu) {
    launch.write(*this, outputs);
  }
}

}  // namespace mlx::core

extern "C" void as_on_gpu_compile(bool on) { mlx::core::compiling = on; }

extern "C" void as_on_gpu_record(bool on) {
  std::lock_guard lock(mlx::core::mutex);
  mlx::core::recording = on;
  mlx::core::records.clear();
}

extern "C" const char* as_on_gpu_records() {
  std::lock_guard lock(mlx::core::mutex);
  return mlx::core::records.c_str();
}
