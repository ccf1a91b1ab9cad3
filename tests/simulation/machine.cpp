// SPDX-License-Identifier: BSD-3-Clause
#include "simulation/machine.hpp"

#include <algorithm>
#include <cstring>
#include <string_view>
#include <tuple>

/// Leaves what the calls preserve on this stack, and goes on where `to` was left. ucontext would
/// do, but asks the system each time.
extern "C" void trib_switch_stacks(void** from, void* to);
asm(R"(
.text
.globl trib_switch_stacks
.hidden trib_switch_stacks
.type trib_switch_stacks, @function
trib_switch_stacks:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
.size trib_switch_stacks, .-trib_switch_stacks
)");

namespace trib::simulation {
namespace {

constexpr std::size_t kStackBytes = 64 << 10, kPreserved = 6;  // registers

Machine* current = nullptr;

std::uintptr_t unit_of(const void* at) { return reinterpret_cast<std::uintptr_t>(at) / 16; }

std::string file_of(Site at) {
  const std::string_view path = at.file;
  return std::string(path.substr(path.rfind('/') + 1));
}
std::string text(Site at) { return file_of(at) + ":" + std::to_string(at.line); }

}  // namespace

Machine& machine() { return *current; }

Machine::Machine(int gpus, std::uint64_t seed)
    : gpus_(static_cast<std::size_t>(gpus)), random_(seed) {
  current = this;
}
Machine::~Machine() { current = nullptr; }

void Machine::exaggerate(const void* memory, std::size_t bytes, unsigned more) {
  const auto* const begin = static_cast<const std::byte*>(memory);
  exaggerations_.push_back({begin, begin + bytes, more});
}
unsigned Machine::excess(const void* word) const {
  for (const Exaggerated& some : exaggerations_)
    if (word >= some.begin && word < some.end) return some.more;
  return 0;
}

void Machine::report(const std::string& fault) {
  if (fault_.empty()) fault_ = fault;
}

// ------------------------------------------------------------------------------------- scheduling

void Machine::launch(int number, const Kernel& kernel) {
  Gpu& gpu = gpus_[static_cast<std::size_t>(number)];
  gpu.kernel = kernel;
  for (unsigned b = 0; b < kernel.blocks; ++b) {
    gpu.blocks.push_back(std::make_unique<Block>());
    for (unsigned t = 0; t < kernel.threads; ++t) {
      auto thread = std::make_unique<Thread>();
      thread->position = {{t}, {b}, {kernel.threads}, {kernel.blocks}};
      thread->block = gpu.blocks.back().get();
      thread->kernel = &gpu.kernel;
      thread->known.resize(kernel.threads);
      if (stacks_.empty()) stacks_.push_back(std::make_unique<std::byte[]>(kStackBytes));
      thread->stack = std::move(stacks_.back());
      stacks_.pop_back();
      auto top = (reinterpret_cast<std::uintptr_t>(thread->stack.get()) + kStackBytes) / 16 * 16;
      auto* const frame = reinterpret_cast<void**>(top) - (kPreserved + 2);
      std::fill_n(frame, kPreserved + 2, nullptr);
      frame[kPreserved] = reinterpret_cast<void*>(&Machine::enter);
      thread->registers = frame;
      gpu.threads.push_back(std::move(thread));
    }
  }
  threads_ += gpu.threads.size();
  has_changed();
}

void Machine::enter() {
  Thread& thread = *current->running_;
  thread.kernel->thread();
  thread.is_over = true;
  current->has_changed();
  current->leave();
}

void Machine::resume(Thread& thread) {
  ++time_;
  running_ = &thread;
  trib_switch_stacks(&registers_, thread.registers);
  running_ = nullptr;
}
void Machine::leave() { trib_switch_stacks(&running_->registers, registers_); }

void Machine::run(int number) {
  Gpu& gpu = gpus_[static_cast<std::size_t>(number)];
  const auto count = static_cast<unsigned>(gpu.threads.size());
  if (count == 0) return;
  const unsigned first = below(count);
  unsigned most = 1 + below(count);
  for (unsigned i = 0; i < count && most > 0; ++i) {
    Thread& thread = *gpu.threads[(first + i) % count];
    if (thread.is_over || thread.is_waiting) continue;
    resume(thread);
    --most;
  }
  if (std::all_of(gpu.threads.begin(), gpu.threads.end(),
                  [](const auto& thread) { return thread->is_over; }))
    finish(gpu);
  else
    ++time_;  // all may wait at barriers
}

/// The kernel is over: what it stored is there.
void Machine::finish(Gpu& gpu) {
  for (const auto& block : gpu.blocks)
    for (const auto& [unit, store] : block->hidden) std::memcpy(store.at, store.value, store.bytes);
  threads_ -= gpu.threads.size();
  for (const auto& thread : gpu.threads) stacks_.push_back(std::move(thread->stack));
  gpu.threads.clear();
  gpu.blocks.clear();
}

std::string Machine::waits(int number, const std::function<std::string(const void*)>& name) const {
  std::map<std::string, int> counts;
  for (const auto& thread : gpu_of(number).threads) {
    if (thread->is_over) continue;
    std::string what = "block " + std::to_string(thread->position.block.x) +
                       (thread->is_waiting ? " in the barrier at " : " at ") + text(thread->at);
    if (!thread->is_waiting && thread->polled != nullptr) what += " for " + name(thread->polled);
    ++counts[what];
  }
  std::string all;
  for (const auto& [what, count] : counts)
    all += (all.empty() ? "" : ", ") + std::to_string(count) + " of " + what;
  return all.empty() ? "nothing" : all;
}

// ------------------------------------------------------------------------------- what a thread
// does

const Position& Machine::position() const { return running_->position; }

void Machine::pause(unsigned times, Site at, const void* polled) {
  running_->at = at;
  running_->polled = polled;
  if (one_in(times)) leave();
}

void Machine::learn(Knowledge& known, const Knowledge& more) {
  if (known.empty()) known.resize(more.size());
  for (std::size_t i = 0; i < more.size(); ++i) known[i] = std::max(known[i], more[i]);
}

void Machine::store(void* at, const void* value, std::size_t bytes) {
  auto& hidden = running_->block->hidden;
  has_changed();
  if (hidden.find(unit_of(at)) == hidden.end() && one_in(4)) {
    std::memcpy(at, value, bytes);
    return;
  }
  const unsigned thread = running_->position.thread.x;
  Store made{thread, ++running_->known[thread], static_cast<std::byte*>(at), bytes, {}};
  std::memcpy(made.value, value, bytes);
  hidden.emplace(unit_of(at), made);
}

void Machine::load(void* value, const void* at, std::size_t bytes) {
  auto& hidden = running_->block->hidden;
  // What the thread knows of it must see, so let all see it.
  const auto [begin, end] = hidden.equal_range(unit_of(at));
  for (auto store = begin; store != end;) {
    if (running_->known[store->second.thread] < store->second.number) {
      ++store;
      continue;
    }
    std::memcpy(store->second.at, store->second.value, store->second.bytes);
    store = hidden.erase(store);
  }
  std::memcpy(value, at, bytes);
}

void Machine::publish(Site at) {
  if (is_left_out("fence", at)) return;
  auto& hidden = running_->block->hidden;
  for (auto store = hidden.begin(); store != hidden.end();) {
    if (running_->known[store->second.thread] < store->second.number) {
      ++store;
      continue;
    }
    std::memcpy(store->second.at, store->second.value, store->second.bytes);
    store = hidden.erase(store);
  }
  has_changed();
}

bool Machine::is_left_out(const char* kind, Site at) {
  const auto [found, is_new] = sites_.try_emplace({at.file, at.line});
  if (is_new) {
    const std::string place = std::string(kind) + " in " + at.function + "() of " + file_of(at);
    places_.insert(place);
    found->second = place == left_out_;
  }
  return found->second;
}

void Machine::come(int number, int threads, Site at) {
  Barrier& barrier = running_->block->barriers[number];
  learn(barrier.known, running_->known);
  if (++barrier.arrived < threads) return;
  if (barrier.arrived > threads)
    report("more than " + std::to_string(threads) + " threads came to the barrier at " + text(at));
  barrier.arrived = 0;
  for (Thread* const thread : barrier.waiting) {
    learn(thread->known, barrier.known);
    thread->is_waiting = false;
  }
  barrier.waiting.clear();
  has_changed();
}
void Machine::arrive(int number, int threads, Site at) {
  if (is_left_out("barrier", at)) return;
  come(number, threads, at);
  pause(2, at);
}
void Machine::synchronise(int number, int threads, Site at) {
  if (is_left_out("barrier", at)) return;
  running_->at = at;
  running_->is_waiting = true;
  running_->block->barriers[number].waiting.push_back(running_);
  come(number, threads, at);
  while (running_->is_waiting) leave();
}

Machine::Warp Machine::exchange(std::uint64_t value, Site at) {
  const unsigned thread = running_->position.thread.x, width = std::tuple_size_v<Warp>;
  Exchange& exchange = running_->block->exchanges[thread / width];
  const std::uint64_t number = exchange.over;
  Warp& values = exchange.values[number % 2];
  values[thread % width] = value;
  running_->at = at;
  running_->polled = nullptr;
  if (++exchange.arrived == width) {
    exchange.arrived = 0;
    ++exchange.over;
  }
  while (exchange.over == number) leave();
  return values;
}

std::int64_t Machine::read_shared(const void* key) {
  Word& word = running_->block->words[key];
  learn(running_->known, word.known);
  return key == forgotten_ ? 0 : word.value;
}
void Machine::write_shared(const void* key, std::int64_t value) {
  Word& word = running_->block->words[key];
  learn(word.known, running_->known);
  word.value = value;
  has_changed();
}

}  // namespace trib::simulation
