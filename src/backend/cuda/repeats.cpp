// SPDX-License-Identifier: BSD-3-Clause
#include "backend/cuda/repeats.hpp"

#include <algorithm>
#include <cstring>

namespace trib::cuda {
namespace {

CUDA_KERNEL_NODE_PARAMS node_parameters(const Repeats::Kernel& kernel, void** parameters) {
  CUDA_KERNEL_NODE_PARAMS made{};
  made.func = kernel.function;
  made.gridDimX = kernel.blocks;
  made.blockDimX = kernel.threads;
  made.gridDimY = made.gridDimZ = made.blockDimY = made.blockDimZ = 1;
  made.kernelParams = parameters;
  return made;
}

}  // namespace

Repeats::~Repeats() {
  if (uses_.empty()) return;
  try {
    const Current current(context_);
    forget();
  } catch (const Error&) {
    // The context is gone, and the graphs with it.
  }
}

void Repeats::forget() noexcept {
  for (Use& use : uses_)
    for (Graph& graph : use.graphs) destroy(graph);
  uses_.clear();
}

void Repeats::launch(const Kernel& kernel, CUstream stream, LaunchRoot& launch, std::size_t bytes,
                     std::uint32_t* first_run, std::uint32_t runs) {
  Use& use = use_of(kernel.function);
  if (use.launches <= common_.enough) ++use.launches;
  if (!use.has_failed && use.launches > common_.enough) {
    const std::uint32_t launches_before = common_.launches, runs_before = common_.runs;
    launch.is_replayed = true;
    launch.number -= launches_before;
    if (first_run != nullptr) *first_run -= runs_before;
    Graph* const graph = find(use, kernel, &launch, bytes);
    launch.is_replayed = false;
    launch.number += launches_before;
    if (first_run != nullptr) *first_run += runs_before;
    if (graph != nullptr) {
      check(driver_.cuGraphLaunch_(graph->exec, stream), "cannot launch a graph");
      graph->last_use = common_.launches++;
      common_.runs += runs;
      return;
    }
  }
  launch_once(kernel, stream, launch);
}

void Repeats::launch_once(const Kernel& kernel, CUstream stream, const LaunchRoot& launch) {
  void* parameters[] = {const_cast<LaunchRoot*>(&launch)};
  check(driver_.cuLaunchKernel_(kernel.function, kernel.blocks, 1, 1, kernel.threads, 1, 1, 0,
                                stream, parameters, nullptr),
        "cannot launch a kernel");
}

Repeats::Use& Repeats::use_of(CUfunction function) {
  for (Use& use : uses_)
    if (use.function == function) return use;
  Use& use = uses_.emplace_back();
  use.function = function;
  return use;
}

Repeats::Graph* Repeats::find(Use& use, const Kernel& kernel, const void* parameters,
                              std::size_t bytes) {
  Graph* oldest = nullptr;
  for (Graph& graph : use.graphs) {
    if (graph.kernel == kernel && std::memcmp(graph.parameters.data(), parameters, bytes) == 0)
      return &graph;
    const auto age = [&](const Graph& of) { return common_.launches - of.last_use; };
    if (oldest == nullptr || age(graph) > age(*oldest)) oldest = &graph;
  }
  const auto* const begin = static_cast<const std::byte*>(parameters);
  if (use.graphs.size() < kMostAlike && common_.graphs < Replays::kMostGraphs) {
    Graph* const made = make(use, kernel, parameters);
    if (made != nullptr) made->parameters.assign(begin, begin + bytes);
    return made;
  }
  if (oldest == nullptr) return nullptr;
  void* list[] = {const_cast<void*>(parameters)};
  const CUDA_KERNEL_NODE_PARAMS node = node_parameters(kernel, list);
  check(driver_.cuGraphExecKernelNodeSetParams_(oldest->exec, oldest->node, &node),
        "cannot set a graph's parameters");
  oldest->kernel = kernel;
  oldest->parameters.assign(begin, begin + bytes);
  return oldest;
}

Repeats::Graph* Repeats::make(Use& use, const Kernel& kernel, const void* parameters) {
  Graph made;
  made.kernel = kernel;
  void* list[] = {const_cast<void*>(parameters)};
  const CUDA_KERNEL_NODE_PARAMS node = node_parameters(kernel, list);
  CUkernelNodeAttrValue priority{};
  priority.priority = common_.priority;
  const bool is_made =
      driver_.cuGraphCreate_(&made.graph, 0) == CUDA_SUCCESS &&
      driver_.cuGraphAddKernelNode_(&made.node, made.graph, nullptr, 0, &node) == CUDA_SUCCESS &&
      driver_.cuGraphKernelNodeSetAttribute_(made.node, CU_KERNEL_NODE_ATTRIBUTE_PRIORITY,
                                             &priority) == CUDA_SUCCESS &&
      driver_.cuGraphInstantiate_(&made.exec, made.graph, 0) == CUDA_SUCCESS;
  if (!is_made) {  // then by launches, as ever
    use.has_failed = true;
    destroy(made);
    return nullptr;
  }
  ++common_.graphs;
  return &use.graphs.emplace_back(std::move(made));
}

void Repeats::destroy(Graph& graph) noexcept {
  if (graph.exec != nullptr) {
    driver_.cuGraphExecDestroy_(graph.exec);
    --common_.graphs;
  }
  if (graph.graph != nullptr) driver_.cuGraphDestroy_(graph.graph);
}

}  // namespace trib::cuda
