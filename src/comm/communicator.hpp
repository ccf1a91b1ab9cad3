// SPDX-License-Identifier: BSD-3-Clause
// A group of ranks that reduce together: settings, layout, channel, program cache. One per MPI
// communicator. Read communicator.cpp from run() on; backend/backend.hpp is what it drives.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "backend/backend.hpp"
#include "base/bootstrap.hpp"
#include "base/config.hpp"
#include "base/types.hpp"
#include "schedule/schedule.hpp"

namespace trib {

/// recvcounts as the caller holds them: `count` numbers of `width` (4 or 8) bytes each.
struct Counts {
  const void* data = nullptr;
  int width = 4;

  std::size_t operator[](int index) const {
    return width == 4 ? static_cast<std::size_t>(static_cast<const std::int32_t*>(data)[index])
                      : static_cast<std::size_t>(static_cast<const std::int64_t*>(data)[index]);
  }
};

/// One reduction, in terms that are the same whatever MPI it came from. All fields but the pointers
/// must be equal on all ranks; in_place may differ.
struct Request {
  Collective collective = Collective::allreduce;
  Dtype dtype = Dtype::f32;
  Op op = Op::sum;
  bool in_place = false;
  int root = 0;           ///< reduce
  std::size_t count = 0;  ///< elements: of the vector; reduce_scatter_block: of each rank's part;
                          ///< reduce_scatter: unused
  Counts counts;          ///< reduce_scatter
  const void* in = nullptr;  ///< in_place: the caller's recvbuf
  void* out = nullptr;       ///< null where a rank gets no result (reduce, not root)
};

/// Why a call is left to the MPI underneath. `name` and `text` of each stand in communicator.cpp.
enum class Decline : std::uint8_t {
  disabled,     ///< TRIB_ENABLE=0
  single_rank,  ///< nothing to speed up
  intercommunicator,
  user_operator,  ///< user-defined operator, REPLACE, NO_OP
  derived_type,   ///< not a predefined type
  undefined_op,   ///< the MPI standard does not define this operator on this type
  bad_argument,   ///< left to the MPI to report
  spans_nodes,    ///< the communicator's ranks are on several machines
  no_memory,      ///< no shared memory could be had
};
inline constexpr int kDeclines = 9;
const char* name(Decline reason);  ///< "user_operator"
const char* text(Decline reason);  ///< "user-defined operator"

class Communicator {
 public:
  /// Collective over the bootstrap's ranks, which must outlive this. Throws only if the bootstrap
  /// does: where no service is possible, declined() says why, on all ranks alike.
  Communicator(std::unique_ptr<Bootstrap> bootstrap, const Config& config);
  ~Communicator();  ///< not collective
  Communicator(const Communicator&) = delete;
  Communicator& operator=(const Communicator&) = delete;

  int rank() const { return rank_; }
  int size() const { return size_; }

  /// Set if this communicator serves nothing; the same on all ranks.
  const Decline* declined() const { return declined_ ? &*declined_ : nullptr; }

  /// Blocking. Zero counts are fine. Not to be called where declined(). Throws Error: on
  /// disagreement between the ranks, a time-out, a dead peer; afterwards the communicator is
  /// unusable.
  void run(const Request& request);

  /// Tells peers that this rank's next call on the communicator is left to the MPI, so that ranks
  /// which disagree get an error instead of a hang. Cheap; to be called once per declined call.
  void note_declined(Collective collective, Decline reason);

  /// Name of the algorithm that served the last run(); "none" before and after a call without
  /// elements.
  const char* last_algorithm() const { return last_algorithm_; }

  /// Counted per communicator, read at the end.
  struct Served {
    Collective collective;
    const char* algorithm;
    std::uint64_t calls, bytes;
    double seconds;
  };
  std::vector<Served> served() const;

 private:
  struct Path;   // an algorithm's program, and how a vector is cut for it
  struct Plan;   // everything that can be worked out before a call
  struct Cache;  // plans and programs
  enum class Route { host, staged, device };

  void run_checked(const Request& request);
  void run_path(Path& path, Plan& plan, Route route, const void* in, void* out);
  void run_with_devices(const Request& request, Plan& plan);
  Route meet(Memory in, Memory out, bool is_first, const Request& request, const Plan& plan);
  void open_device(const Request& request);

  Plan& plan_for(const Request& request);
  void make_plan(Plan& plan, const Request& request);
  Path& path_for(Plan& plan, Route route);
  void make_path(Plan& plan, Path& path, Route route);
  void reserve_data(Plan& plan, Path& path, Route route);
  void wait(Operation& operation, int spin);
  template <class Step, class Position>
  void wait_slowly(Step&& step, Position&& position);
  [[noreturn]] void fail(const Error& error);

  const std::unique_ptr<Bootstrap> bootstrap_;
  Config config_;
  int rank_ = 0, size_ = 1;
  std::optional<Decline> declined_;
  std::vector<int> node_of_;
  bool is_crowded_ = false;
  int spin_ = 0;  // polls before a wait lets others run
  std::unique_ptr<HostChannel> channel_;
  DeviceBackend* device_ = nullptr;  // null: none, or switched off
  bool meets_ = false;               // ranks meet before every call: some use a device
  bool uses_device_ = false;         // this one does
  bool is_device_refused_ = false;
  std::unique_ptr<Channel> device_channel_;
  std::string failure_;  // why it is unusable; empty: it is not
  const char* last_algorithm_ = "none";
  std::unique_ptr<Cache> cache_;
};

}  // namespace trib
