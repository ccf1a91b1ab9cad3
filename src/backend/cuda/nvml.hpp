// SPDX-License-Identifier: BSD-3-Clause
// What NVIDIA's management library knows of the links between GPUs, and the driver does not tell.
// For `trib info` only; a machine may do without it.
#pragma once

#include <string>

namespace trib::cuda {

class Nvml {
 public:
  /// Loads the library; `why_not()` says so if it is not there.
  Nvml();
  ~Nvml();
  Nvml(const Nvml&) = delete;
  Nvml& operator=(const Nvml&) = delete;

  const std::string& why_not() const { return why_not_; }
  /// GPUs are named by their PCI addresses. NVLinks between the two: those that lead to the other
  /// one, or, through switches, as many as the one with fewer has. Zero: none, or not known.
  int nvlinks(const std::string& one, const std::string& other) const;
  /// What a transfer over PCIe passes, in the words of `nvidia-smi topo`: PIX, PXB, PHB, NODE, SYS.
  /// Empty: not known.
  std::string common_ancestor(const std::string& one, const std::string& other) const;

 private:
  struct Library;
  Library* library_ = nullptr;
  std::string why_not_;
};

}  // namespace trib::cuda
