// The library's C interface, the choice of an instruction set, and the threads.
#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <cstdlib>
#include <memory>
#include <mutex>
#include <new>
#include <string>
#include <system_error>
#include <thread>
#include <vector>
#if !defined(_WIN32)
#include <unistd.h>
#endif

#include "call.h"

#if defined(_WIN32)
#define EXPORT extern "C" __declspec(dllexport)
static int64_t process() { return 0; }  // no fork
#else
#define EXPORT extern "C" __attribute__((visibility("default")))
static int64_t process() { return getpid(); }
#endif

namespace {

// A loop that some threads share. Whoever is awake takes the next index: a thread that the system does not run in time
// finds nothing left, and nobody waits for it. So the loop may end before all threads have seen it.
struct Loop {
  Work work;
  void* context;
  int64_t count;
  std::atomic<int64_t> next{0}, done{0};
  std::mutex mutex;
  std::condition_variable finished;

  void run() {
    int64_t mine = 0;
    for (int64_t i; (i = next.fetch_add(1)) < count; ++mine) work(context, i);
    if (mine && done.fetch_add(mine) + mine == count) {
      std::lock_guard<std::mutex> lock(mutex);
      finished.notify_one();
    }
  }
};

struct Pool {
  std::mutex mutex;
  std::condition_variable wake;
  std::shared_ptr<Loop> loop;  // the newest
  int64_t wanted = 0;          // helpers that it still lacks
  int64_t size = 0;
  const int64_t owner = process();

  void help() {
    std::unique_lock<std::mutex> lock(mutex);
    for (;;) {
      wake.wait(lock, [&] { return wanted > 0; });
      --wanted;
      std::shared_ptr<Loop> mine = loop;
      lock.unlock();
      mine->run();
      mine.reset();
      lock.lock();
    }
  }

  void start(std::shared_ptr<Loop> given, int64_t helpers) {
    std::lock_guard<std::mutex> lock(mutex);
    try {
      for (; size < helpers; ++size) std::thread([this] { help(); }).detach();
    } catch (const std::system_error&) {  // the system has no more: fewer do the work
    }
    loop = std::move(given);
    wanted = helpers;
    for (int64_t i = 0; i < helpers; ++i) wake.notify_one();
  }
};

// Never destroyed: its threads may outlive main. A forked process has none of them, and makes a pool of its own.
Pool& pool() {
  static std::atomic<Pool*> current{nullptr};
  Pool* found = current.load();
  if (!found || found->owner != process()) {
    Pool* made = new Pool;
    if (current.compare_exchange_strong(found, made)) return *made;
    delete made;
  }
  return *current.load();
}

}  // namespace

void parallel_for(int64_t count, int64_t threads, Work work, void* context) {
  threads = std::min(threads, count);
  if (threads <= 1) {
    for (int64_t i = 0; i < count; ++i) work(context, i);
    return;
  }
  auto loop = std::make_shared<Loop>();
  loop->work = work, loop->context = context, loop->count = count;
  pool().start(loop, threads - 1);
  loop->run();
  std::unique_lock<std::mutex> lock(loop->mutex);
  loop->finished.wait(lock, [&] { return loop->done == count; });
}

void* reusable_memory(int64_t bytes) {
  struct Memory {
    void* at = nullptr;
    int64_t size = 0;
    ~Memory() { std::free(at); }
  };
  static thread_local Memory memory;
  if (memory.size < bytes) {
    std::free(memory.at);
    memory.size = 0;
    memory.at = std::malloc(bytes + 64);
    if (!memory.at) throw std::bad_alloc();
    memory.size = bytes;
  }
  return reinterpret_cast<void*>((reinterpret_cast<uintptr_t>(memory.at) + 63) & ~uintptr_t{63});
}

namespace {

struct Set {
  const char* name;
  int (*forward)(const Call&);
  int (*backward)(const Call&);
};

// The best that this processor and the build have, or the one that MGK_NATIVE_ISA names.
Set choose() {
  const char* asked = std::getenv("MGK_NATIVE_ISA");
  auto wanted = [&](const char* name) { return !asked || !*asked || std::string(asked) == name; };
#if defined(__x86_64__) || defined(_M_X64)
  __builtin_cpu_init();
  if (wanted("avx512") && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512dq") &&
      __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512bw"))
    return {"avx512", forward_avx512, backward_avx512};
  if (wanted("avx2") && __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma"))
    return {"avx2", forward_avx2, backward_avx2};
#endif
  return {"portable", forward_portable, backward_portable};
}
const Set& chosen() {
  static const Set set = choose();
  return set;
}

}  // namespace

EXPORT int64_t mgk_call_bytes() { return sizeof(Call); }
EXPORT const char* mgk_instruction_set() { return chosen().name; }
EXPORT int mgk_forward(const Call* call) { return chosen().forward(*call); }
EXPORT int mgk_backward(const Call* call) { return chosen().backward(*call); }
