// SPDX-License-Identifier: BSD-3-Clause
// Random legal programs: communicators that come and go, reductions in all forms on them, messages
// and other collectives between, completed by each rank in its own order, at its own pace.
//   random_calls FIRST COUNT STEPS [threads|cuda]    programs with the seeds FIRST to FIRST + COUNT
//   - 1
// cuda: mostly with all buffers on GPUs, at times each rank with its own mixture.
// The seed of a program that fails stands in what is said; every result is compared.
#include <algorithm>
#include <chrono>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "gpu.hpp"
#include "requests_bag.hpp"

namespace {

bool are_devices_used = false;

/// Bytes in host memory, and where calls find them.
class Bytes {
 public:
  Bytes(std::size_t bytes, bool is_on_device) : host(bytes) {
    if (is_on_device) device_ = Gpu::get().allocate(bytes);
  }
  ~Bytes() {
    if (device_) Gpu::get().free(device_);
  }
  Bytes(const Bytes&) = delete;
  Bytes& operator=(const Bytes&) = delete;
  void* ready() {
    if (!device_) return host.data();
    Gpu::get().copy(device_, host.data(), host.size());
    return device_;
  }
  void fetch() {
    if (device_) Gpu::get().copy(host.data(), device_, host.size());
  }

  std::vector<unsigned char> host;

 private:
  void* device_ = nullptr;
};

/// Of buffers in the host's memory or a device's.
class Placed : public Reduction {
 public:
  Placed(MPI_Comm comm, const Case& what, bool in_on_device, bool out_on_device)
      : Reduction(comm, what) {
    if (in_on_device) in_at_ = Gpu::get().allocate(in_.size());
    if (out_on_device) out_at_ = Gpu::get().allocate(out_.size());
  }
  ~Placed() {
    for (void* const memory : {in_at_, out_at_})
      if (memory) Gpu::get().free(memory);
  }
  Placed(const Placed&) = delete;
  Placed& operator=(const Placed&) = delete;

  void fill(int round) {
    Reduction::fill(round);
    if (in_at_) Gpu::get().copy(in_at_, in_.data(), in_.size());
    if (out_at_) Gpu::get().copy(out_at_, out_.data(), out_.size());
  }
  void check() {
    if (in_at_) Gpu::get().copy(in_.data(), in_at_, in_.size());
    if (out_at_) Gpu::get().copy(out_.data(), out_at_, out_.size());
    Reduction::check();
  }
};

/// Numbers that follow from a seed.
class Dice {
 public:
  explicit Dice(std::uint64_t seed) : next_(seed << 32) {}
  int operator()(int below) {
    return static_cast<int>(scramble(++next_) % static_cast<unsigned>(below));
  }

 private:
  std::uint64_t next_;
};

/// Small ones mostly, as in programs.
int some_count(Dice& dice) {
  constexpr int kCounts[] = {0, 1, 1, 2, 7, 40, 40, 300, 300, 3000, 3000, 20000, 70000};
  return kCounts[dice(static_cast<int>(std::size(kCounts)))];
}

/// One program, or what one thread does of it. All ranks of `base` throw the same dice for what is
/// called and each its own for when: no rank ever waits for what its peers begin later.
class Program {
 public:
  Program(MPI_Comm base, int seed) : all_(static_cast<std::uint64_t>(seed)), base_(base) {
    MPI_Comm_rank(base, &rank_);
    MPI_Comm_size(base, &size_);
    own_ = Dice(static_cast<std::uint64_t>(seed * 1000 + rank_ + 1));
    std::vector<int> members(static_cast<std::size_t>(size_));
    std::iota(members.begin(), members.end(), 0);
    groups_.push_back({base, members});
  }

  void run(int steps) {
    for (int step = 0; step < steps; ++step) {
      take_step();
      if (own_(40) == 0) std::this_thread::sleep_for(std::chrono::microseconds(own_(2000)));
      if (open_.size() > 40 || own_(6) == 0) complete_some(own_(3) == 0 ? 1000 : 1 + own_(6));
    }
    end();
  }

 private:
  struct Group {
    MPI_Comm comm;             // null: this rank is in none, or its request is to be completed
    std::vector<int> members;  // by rank of `base`
    std::shared_ptr<MPI_Comm> promised = {};  // by MPI_Comm_idup
    int serial = 0;
  };
  /// A request that is under way.
  struct Open {
    MPI_Request request;
    std::function<void()> check;
  };
  struct Persistent {
    int group_serial;
    std::shared_ptr<Placed> reduction;
    MPI_Request request;
    bool is_active = false;
    int round = 0;
  };

  bool is_in(const Group& group) const {
    return std::find(group.members.begin(), group.members.end(), rank_) != group.members.end();
  }

  /// A group of which this rank may be. What idup has promised is waited for.
  Group& some_group() {
    Group& group = groups_[static_cast<std::size_t>(all_(static_cast<int>(groups_.size())))];
    if (!group.promised) return group;
    if (is_in(group)) {
      while (*group.promised == MPI_COMM_NULL) complete_some(1000);
      group.comm = *group.promised;
    }
    group.promised.reset();
    return group;
  }

  /// Which of two buffers are on this rank's device.
  std::pair<bool, bool> some_places() {
    if (!are_devices_used) return {};
    const bool are_mixed = all_(5) == 0;
    const bool first = own_(2) == 0, second = own_(2) == 0;
    return are_mixed ? std::pair(first, second) : std::pair(true, true);
  }

  Case some_case(const Group& group) {
    const int ranks = static_cast<int>(group.members.size());
    Case what;
    what.collective = kCollectives[all_(4)];
    what.kind = all_(static_cast<int>(kinds().size()));
    what.count = some_count(all_);
    if (what.collective == Collective::reduce_scatter_block) what.count /= ranks;
    what.root = all_(ranks);
    what.spread = all_(3);
    // MPICH 5.0.2 refuses its own copies within large vectors.
    const bool is_refused = is_mpich() && !is_intel() && what.count > 3000 &&
                            what.collective == Collective::reduce_scatter;
    what.in_place = all_(3) == 0 && !is_refused;
    what.large = all_(4) == 0;
    return what;
  }

  void take_step() {
    const int which = all_(100);
    if (which < 30)
      reduce();
    else if (which < 55)
      post();
    else if (which < 67)
      persistent();
    else if (which < 80)
      message();
    else if (which < 87)
      others();
    else if (which < 94)
      make_group();
    else if (which < 98)
      free_group();
    else
      reduce_by_own_operator();
  }

  void reduce() {
    Group& group = some_group();
    const Case what = some_case(group);
    const int round = all_(1000);
    const auto [in, out] = some_places();
    if (!is_in(group)) return;
    Placed reduction(group.comm, what, in, out);
    reduction.fill(round);
    reduction.call();
    reduction.check();
  }

  void post() {
    Group& group = some_group();
    const Case what = some_case(group);
    const int round = all_(1000);
    const auto [in, out] = some_places();
    if (!is_in(group)) return;
    const auto reduction = std::make_shared<Placed>(group.comm, what, in, out);
    reduction->fill(round);
    MPI_Request request;
    reduction->post(&request);
    open_.push_back({request, [reduction] { reduction->check(); }});
  }

  void persistent() {
#if HAS_PERSISTENT_REDUCTIONS
    if (!is_served_here() && is_mpich()) return;  // see Bag::add_persistent
    if (persistents_.size() < 6 && all_(3) == 0) {
      Group& group = some_group();
      const Case what = some_case(group);
      if (is_mpich() && group.members.size() == 1) return;  // not ours, see Bag::add_persistent
      const auto [in, out] = some_places();
      Persistent one{group.serial, nullptr, MPI_REQUEST_NULL};
      if (is_in(group)) {
        one.reduction = std::make_shared<Placed>(group.comm, what, in, out);
        one.reduction->init(&one.request);
      }
      persistents_.push_back(std::move(one));
      return;
    }
    // Each rank starts them in its own order.
    std::vector<Persistent*> started;
    for (Persistent& one : persistents_)
      if (all_(2) == 0 && one.reduction) started.push_back(&one);
    if (is_served_here())
      for (std::size_t i = started.size(); i > 1; --i)
        std::swap(started[i - 1], started[static_cast<std::size_t>(own_(static_cast<int>(i)))]);
    for (Persistent* const one : started) finish_persistent(*one);
    for (Persistent* const one : started) {
      one->reduction->fill(++one->round);
      MPI_Start(&one->request);
      one->is_active = true;
    }
#endif
  }

  void finish_persistent(Persistent& one) {
    if (!one.is_active) return;
    finish_started(&one.request, own_(16));
    one.is_active = false;
    one.reduction->check();
  }

  void free_persistent(Persistent& one) {
    if (!one.reduction) return;
    finish_persistent(one);
    MPI_Request_free(&one.request);
  }

  void message() {
    const int from = all_(size_), to = all_(size_), tag = all_(3);
    const std::size_t bytes = static_cast<std::size_t>(some_count(all_)) * 4;
    const bool is_blocking = all_(3) == 0 && from != to;
    const auto value = static_cast<unsigned char>(all_(256));
    const auto [text_place, room_place] = some_places();
    if (rank_ == to) {
      const auto room = std::make_shared<Bytes>(bytes + 1, room_place);
      MPI_Request request;
      MPI_Irecv(room->ready(), static_cast<int>(bytes), MPI_BYTE, from, tag, base_, &request);
      open_.push_back({request, [room, value, bytes] {
                         room->fetch();
                         for (std::size_t i = 0; i < bytes; ++i)
                           EXPECT(room->host[i] == value, "byte %zu of a message of %zu", i, bytes);
                       }});
    }
    if (rank_ != from) return;
    const auto text = std::make_shared<Bytes>(bytes + 1, text_place);
    text->host.assign(bytes + 1, value);
    if (is_blocking) {
      MPI_Send(text->ready(), static_cast<int>(bytes), MPI_BYTE, to, tag, base_);
      return;
    }
    MPI_Request request;
    MPI_Isend(text->ready(), static_cast<int>(bytes), MPI_BYTE, to, tag, base_, &request);
    open_.push_back({request, [text] {}});
  }

  /// Collectives of the MPI's own.
  void others() {
    Group& group = some_group();
    const int which = all_(3), count = some_count(all_);
    const int ranks = static_cast<int>(group.members.size()), root = all_(ranks);
    const bool is_on_device = some_places().first;
    if (!is_in(group)) return;
    int me;
    MPI_Comm_rank(group.comm, &me);
    if (which == 0) {
      MPI_Barrier(group.comm);
      return;
    }
    const std::size_t bytes = static_cast<std::size_t>(count) * sizeof(int);
    const auto values = std::make_shared<Bytes>(bytes + 1, is_on_device);
    std::fill(values->host.begin(), values->host.end(), static_cast<unsigned char>(me == root));
    const auto check = [values, bytes] {
      values->fetch();
      for (std::size_t i = 0; i < bytes; ++i)
        EXPECT(values->host[i] == 1, "byte %zu of a broadcast of %zu", i, bytes);
    };
    if (which == 1) {
      MPI_Bcast(values->ready(), count, MPI_INT, root, group.comm);
      check();
      return;
    }
    MPI_Request request;
    MPI_Ibcast(values->ready(), count, MPI_INT, root, group.comm, &request);
    open_.push_back({request, check});
  }

  void reduce_by_own_operator() {
    Group& group = some_group();
    const int count = some_count(all_) / 10;
    if (!is_in(group)) return;
    MPI_Op op;
    MPI_Op_create(
        [](void* from, void* to, int* length, MPI_Datatype*) {
          for (int i = 0; i < *length; ++i) static_cast<int*>(to)[i] += static_cast<int*>(from)[i];
        },
        1, &op);
    const std::vector<int> in(static_cast<std::size_t>(count), rank_);
    std::vector<int> out(in.size());
    MPI_Allreduce(in.data(), out.data(), count, MPI_INT, op, group.comm);
    MPI_Op_free(&op);
    const int sum = std::accumulate(group.members.begin(), group.members.end(), 0);
    for (const int value : out) EXPECT(value == sum, "%d, not %d", value, sum);
  }

  void make_group() {
    const int which = all_(4), parts = 1 + all_(2), salt = all_(1000);
    if (groups_.size() > 8) return;
    Group& parent = some_group();
    Group child{MPI_COMM_NULL, {}, {}, ++serials_};
    if (which == 0) {
      child.members = parent.members;
      if (is_in(parent)) MPI_Comm_dup(parent.comm, &child.comm);
    } else if (which == 1) {
      child.members = parent.members;
      child.promised = std::make_shared<MPI_Comm>(MPI_COMM_NULL);
      if (is_in(parent)) {
        const auto made = std::make_shared<MPI_Comm>(MPI_COMM_NULL);
        MPI_Request request;
        MPI_Comm_idup(parent.comm, made.get(), &request);
        // Open MPI mixes up its messages with those of other nonblocking collectives.
        if (is_open_mpi()) {
          MPI_Wait(&request, MPI_STATUS_IGNORE);
          *child.promised = *made;
        } else {
          open_.push_back({request, [made, promised = child.promised] { *promised = *made; }});
        }
      }
    } else {
      // Some are left out; others are in another part, which is theirs alone.
      const auto part_of = [&](int member) {
        return static_cast<int>(scramble(static_cast<unsigned>(member * 1000 + salt)) %
                                static_cast<unsigned>(parts + 1));
      };
      for (const int member : parent.members)
        if (part_of(member) == 0) child.members.push_back(member);
      const int mine = part_of(rank_);
      if (is_in(parent)) {
        MPI_Comm made;
        MPI_Comm_split(parent.comm, which == 2 || mine == 0 ? mine : MPI_UNDEFINED, 0, &made);
        if (mine == 0)
          child.comm = made;
        else if (made != MPI_COMM_NULL)
          MPI_Comm_free(&made);
      }
      if (child.members.empty()) return;
    }
    groups_.push_back(std::move(child));
  }

  /// Its nonblocking operations may be under way. (Open MPI uses its own after that.)
  void free_group() {
    const int which = all_(static_cast<int>(groups_.size()));
    if (which == 0) return;
    free_group(which);
  }
  void free_group(int which) {
    Group group = groups_[static_cast<std::size_t>(which)];
    groups_.erase(groups_.begin() + which);
    if (group.promised && is_in(group)) {
      while (*group.promised == MPI_COMM_NULL) complete_some(1000);
      group.comm = *group.promised;
    }
    if (is_open_mpi()) complete_some(1000);
    std::erase_if(persistents_, [&](Persistent& one) {
      if (one.group_serial != group.serial) return false;
      free_persistent(one);
      return true;
    });
    if (is_in(group)) MPI_Comm_free(&group.comm);
  }

  /// As many of the requests that are under way, by any function.
  void complete_some(int most) {
    std::vector<Open> chosen;
    for (int i = 0; i < most && !open_.empty(); ++i) {
      const auto which = static_cast<std::ptrdiff_t>(own_(static_cast<int>(open_.size())));
      chosen.push_back(std::move(open_[static_cast<std::size_t>(which)]));
      open_.erase(open_.begin() + which);
    }
    Bag bag;
    for (Open& one : chosen)
      bag.add(one.request, true, false, [&one](const MPI_Status*) { one.check(); });
    if (own_(4) == 0) bag.add_null();
    bag.complete(static_cast<How>(own_(kHows)), own_(2) == 0);
  }

  void end() {
    while (!open_.empty()) complete_some(1000);
    while (groups_.size() > 1) free_group(static_cast<int>(groups_.size()) - 1);
    for (Persistent& one : persistents_) free_persistent(one);
    persistents_.clear();
  }

  Dice all_, own_{0};
  MPI_Comm base_;
  int rank_ = 0, size_ = 0, serials_ = 0;
  std::vector<Group> groups_;
  std::vector<Open> open_;
  std::vector<Persistent> persistents_;
};

}  // namespace

int main(int argc, char** argv) {
  const int first = argc > 1 ? std::atoi(argv[1]) : 1, count = argc > 2 ? std::atoi(argv[2]) : 5;
  const int steps = argc > 3 ? std::atoi(argv[3]) : 200;
  const std::string mode = argc > 4 ? argv[4] : "";
  const bool has_threads = mode == "threads";
  int provided;
  MPI_Init_thread(&argc, &argv, has_threads ? MPI_THREAD_MULTIPLE : MPI_THREAD_SINGLE, &provided);
  rank = world_rank();
  size = world_size();
  are_devices_used = mode == "cuda";
  if (are_devices_used) skip_without_gpu();
  static std::string name;
  for (int seed = first; seed < first + count; ++seed) {
    name = "seed " + std::to_string(seed);
    section = name.c_str();
    if (has_threads && provided == MPI_THREAD_MULTIPLE) {
      MPI_Comm other;
      MPI_Comm_dup(MPI_COMM_WORLD, &other);
      std::thread thread([&] { Program(other, seed + 500000).run(steps); });
      Program(MPI_COMM_WORLD, seed).run(steps);
      thread.join();
      MPI_Comm_free(&other);
    } else {
      Program(MPI_COMM_WORLD, seed).run(steps);
    }
  }
  if (rank == 0) std::printf("random calls: %ld checks\n", checks.load());
  MPI_Finalize();
}
