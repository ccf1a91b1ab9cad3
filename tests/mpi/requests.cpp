// SPDX-License-Identifier: BSD-3-Clause
// Nonblocking and persistent reductions, as any program may use them: alone, thousands at once,
// among requests of other kinds, around blocking calls, with a peer that comes late.
//   requests [section...]    all sections by default; `first` and `first-send` say most when alone
// One reduction is requests_reduction.hpp, an array of requests is requests_bag.hpp.
#include <array>
#include <csignal>
#include <cstdio>
#include <memory>
#include <string>
#include <string_view>
#include <thread>
#include <vector>

#include "requests_bag.hpp"

namespace {

/// More ranks than cores: bare MPIs spin, and every message costs a time slice.
bool is_crowded() { return size > static_cast<int>(std::thread::hardware_concurrency()); }
int unless_crowded(int all, int less) { return is_crowded() ? less : all; }

/// A communicator that is freed at the end of its scope.
class Dup {
 public:
  explicit Dup(MPI_Comm of = MPI_COMM_WORLD) { MPI_Comm_dup(of, &comm_); }
  Dup(const Dup&) = delete;
  Dup& operator=(const Dup&) = delete;
  ~Dup() { MPI_Comm_free(&comm_); }
  operator MPI_Comm() const { return comm_; }

 private:
  MPI_Comm comm_ = MPI_COMM_NULL;
};

std::shared_ptr<Reduction> reduction(MPI_Comm comm, const Case& what) {
  return std::make_shared<Reduction>(comm, what);
}
Case int_sum(int count) {
  Case what;
  what.count = count;
  return what;
}

/// Calls each(case) for collective x kind x count x in place x root or division of the vector.
template <class Each>
void for_all_cases(const std::vector<int>& counts, Each each) {
  const bool is_bare_mpich = is_mpich() && !is_intel();
  for (const Collective collective : kCollectives)
    for (int kind = 0; kind < static_cast<int>(kinds().size()); ++kind)
      for (const int count : counts)
        for (const bool in_place : {false, true}) {
          const int variants = collective == Collective::reduce           ? size
                               : collective == Collective::reduce_scatter ? 3
                                                                          : 1;
          for (int variant = 0; variant < variants; ++variant) {
            // Of large vectors, and where time is scarce, some: all ranks throw the same dice.
            if (choose(4) != 0 && (is_crowded() || count > 1000)) continue;
            Case what;
            what.collective = collective;
            what.kind = kind;
            what.count = collective == Collective::reduce_scatter_block && count > 1000
                             ? count / size
                             : count;
            what.in_place = in_place;
            if (collective == Collective::reduce) what.root = variant;
            if (collective == Collective::reduce_scatter) what.spread = variant;
            what.large = choose(3) == 0;
            // MPICH 5.0.2, from 512 KiB on: the copy to the begin of the buffer may overlap, and
            // ends in an assertion ("memcpy argument memory ranges overlap"), also in blocking
            // calls.
            if (is_bare_mpich && in_place && what.spread != 0 && count >= 30000) continue;
            each(what);
          }
        }
}

// -------------------------------------------------------------------------------- foreign requests

/// What a rank sends in a message.
void write_message(std::vector<unsigned char>& data, int sender, int tag, int round) {
  for (std::size_t i = 0; i < data.size(); ++i)
    data[i] =
        static_cast<unsigned char>(i * 7 + static_cast<std::size_t>(sender * 13 + tag + round));
}

struct Message {
  Message(int peer_rank, int its_tag, int bytes, std::size_t room = 0)
      : peer(peer_rank), tag(its_tag), data(static_cast<std::size_t>(bytes) + room), sent(data) {
    sent.resize(static_cast<std::size_t>(bytes));
  }
  void check_received(const MPI_Status* status, int round) {
    if (status != nullptr) {
      int count = -1;
      MPI_Get_count(status, MPI_BYTE, &count);
      EXPECT(status->MPI_SOURCE == peer && status->MPI_TAG == tag &&
                 count == static_cast<int>(sent.size()),
             "received %d bytes from %d, tag %d; expected %zu from %d, tag %d", count,
             status->MPI_SOURCE, status->MPI_TAG, sent.size(), peer, tag);
    }
    write_message(sent, peer, tag, round);
    EXPECT(std::equal(sent.begin(), sent.end(), data.begin()), "a message of %zu bytes, tag %d",
           sent.size(), tag);
    data.assign(data.size(), 0xee);
  }

  int peer, tag;
  std::vector<unsigned char> data, sent;
};

/// Messages around the ring of ranks.
void add_messages(Bag& bag, MPI_Comm comm, int messages) {
  const int right = (rank + 1) % size, left = (rank + size - 1) % size;
  constexpr int kBytes[] = {8, 1 << 20, 0, 1000, 70000};
  for (int k = 0; k < messages; ++k) {
    const int bytes = kBytes[k % 5], tag = 100 + k;
    const auto in = std::make_shared<Message>(left, tag, bytes, k % 2 ? 24 : 0);
    const auto out = std::make_shared<Message>(right, tag, bytes);
    MPI_Request request;
    MPI_Irecv(in->data.data(), static_cast<int>(in->data.size()), MPI_BYTE,
              k % 3 == 0 ? MPI_ANY_SOURCE : left, tag, comm, &request);
    bag.add(request, true, false,
            [in](const MPI_Status* status) { in->check_received(status, 0); });
    write_message(out->data, rank, tag, 0);
    MPI_Isend(out->data.data(), bytes, MPI_BYTE, right, tag, comm, &request);
    bag.add(request, true, false, [out](const MPI_Status*) {});
  }
}

/// A pair of persistent requests, inactive: `round` says which message goes around.
void add_persistent_messages(Bag& bag, MPI_Comm comm, int tag, int bytes,
                             const std::shared_ptr<int>& round, bool is_started = false) {
  const int right = (rank + 1) % size, left = (rank + size - 1) % size;
  const auto in = std::make_shared<Message>(left, tag, bytes, 8);
  const auto out = std::make_shared<Message>(right, tag, bytes);
  MPI_Request receive, send;
  MPI_Recv_init(in->data.data(), static_cast<int>(in->data.size()), MPI_BYTE, left, tag, comm,
                &receive);
  MPI_Send_init(out->data.data(), bytes, MPI_BYTE, right, tag, comm, &send);
  write_message(out->data, rank, tag, *round);
  if (is_started) {
    MPI_Start(&receive);
    MPI_Start(&send);
  }
  bag.add(receive, is_started, true,
          [in, round](const MPI_Status* status) { in->check_received(status, *round); });
  bag.add(send, is_started, true, [out, round, tag](const MPI_Status*) {
    write_message(out->data, rank, tag, *round + 1);
  });
}

// ------------------------------------------------------------------------------------- nonblocking

void nonblocking() {
  const Dup comm;
  int how = rank;
  for_all_cases({0, 1, 2, 3, 7, 64, 1000, 40000, 300000}, [&](const Case& what) {
    Reduction reduction(comm, what);
    for (int round = 0; round < (what.count > 64 ? 1 : 2); ++round) {
      reduction.fill(round);
      MPI_Request request = MPI_REQUEST_NULL;
      reduction.post(&request);
      EXPECT(request != MPI_REQUEST_NULL, "%s gave no request", reduction.name().c_str());
      finish(&request, ++how);
      EXPECT(request == MPI_REQUEST_NULL, "%s left its request", reduction.name().c_str());
      reduction.check();
    }
  });
}

/// No blocking collective on communicators of the program's own, nor any other before. To be run
/// alone, with statistics: then all are served.
void alone() {
  const Dup dup, of_dup((MPI_Comm(dup)));
  MPI_Comm half = MPI_COMM_NULL;
  MPI_Comm_split(MPI_COMM_WORLD, rank % 2, rank, &half);
  for (int i = 0; i < 100; ++i)
    for (const MPI_Comm comm : {MPI_Comm(dup), MPI_Comm(of_dup), half}) {
      int ranks = 0, sum = -1;
      MPI_Comm_size(comm, &ranks);
      MPI_Request request;
      MPI_Iallreduce(&i, &sum, 1, MPI_INT, MPI_SUM, comm, &request);
      finish(&request, i);
      EXPECT(sum == ranks * i, "%d", sum);
    }
  MPI_Comm_free(&half);
}

// -------------------------------------------------------------------------------------------- many

/// `n` reductions and others are posted, then completed.
void many_at_once(MPI_Comm comm, int n, How how, bool with_foreign, int seed) {
  Bag bag;
  const auto round = std::make_shared<int>(0);
  const auto value = std::make_shared<int>(rank == 0 ? 4711 + seed : -1);
  if (with_foreign) {
    add_persistent_messages(bag, comm, 80, 1000, round, true);
    add_persistent_messages(bag, comm, 81, 1000, round, false);
    bag.add_null();
  }
  for (int i = 0; i < n; ++i) {
    MPI_Request request;
    // One in 16 is not small.
    const auto one = reduction(comm, varied(i + seed, size, n <= 64 && i % 16 == 3 ? 30000 : 40));
    one->fill(i);
    one->post(&request);
    bag.add(request, true, false, [one](const MPI_Status*) { one->check(); });
    if (!with_foreign) continue;
    if (i == n / 3) {
      MPI_Ibcast(value.get(), 1, MPI_INT, 0, comm, &request);
      bag.add(request, true, false,
              [value, seed](const MPI_Status*) { EXPECT(*value == 4711 + seed, "%d", *value); });
    }
    if (i == n / 2) {
      MPI_Ibarrier(comm, &request);
      bag.add(request, true, false, [](const MPI_Status*) {});
      add_messages(bag, comm, 5);
    }
    if (i % 50 == 1) bag.add_null();
  }
  // In another order on every rank, sometimes as posted.
  if (seed % 3 != 0) bag.shuffle(static_cast<std::uint64_t>(seed * 16 + rank));
  bag.complete(how, (seed + rank) % 2 == 0);
  bag.free_all();
}

void many() {
  const Dup comm;
  int seed = 0;
  for (const int n : {1, 5, 64})
    for (const bool with_foreign : {false, true})
      for (int k = 0; k < kHows; ++k)
        // Every function, and another one on every rank.
        many_at_once(comm, n, static_cast<How>((k + 2 * rank) % kHows), with_foreign, ++seed);
  const int n = unless_crowded(is_served_here() ? 10000 : 3000, 1000);
  for (int k = 0; k < kHows; k += 4)
    many_at_once(comm, n, static_cast<How>((k + rank) % kHows), k != 0, ++seed);
  Bag empty;
  empty.complete(How::waitall, true);
  for (int i = 0; i < 4; ++i) empty.add_null();
  for (int k = 0; k < kHows; ++k) empty.complete(static_cast<How>(k), k % 2 == 0);
}

// ------------------------------------------------------------------------------------ interleaving

/// Blocking collectives between post and wait, on the same communicator. `waits_first` differs
/// between ranks; the order of the collectives does not.
void interleave(MPI_Comm comm, int count, bool waits_first, int how) {
  const auto run_blocking = [&](const Case& what, int round) {
    Reduction blocking(comm, what);
    blocking.fill(round);
    blocking.call();
    blocking.check();
  };
  Case to_last = int_sum(count / 2);
  to_last.collective = Collective::reduce;
  to_last.root = size - 1;
  Case scattered = to_last;
  scattered.collective = Collective::reduce_scatter_block;

  Reduction first(comm, int_sum(count)), second(comm, to_last), third(comm, scattered);
  for (int kind = 0; kind < 5; ++kind) {
    MPI_Request request;
    first.fill(kind);
    first.post(&request);
    if (waits_first) finish(&request, how);
    switch (kind) {
      case 0:
        run_blocking(int_sum(count), 10);
        break;
      case 1:
        run_blocking(to_last, 11);
        break;
      case 2: {
        std::vector<int> data(static_cast<std::size_t>(count), rank == 0 ? 77 : 0);
        MPI_Bcast(data.data(), count, MPI_INT, 0, comm);
        EXPECT(data.back() == 77, "%d", data.back());
        break;
      }
      case 3:
        MPI_Barrier(comm);
        break;
      default:
        run_blocking(scattered, 12);
    }
    if (!waits_first) finish(&request, how);
    first.check();
  }

  // Several in flight around several blocking ones.
  MPI_Request requests[3];
  first.fill(5);
  second.fill(6);
  third.fill(7);
  first.post(&requests[0]);
  run_blocking(to_last, 13);
  second.post(&requests[1]);
  run_blocking(int_sum(count), 14);
  MPI_Barrier(comm);
  third.post(&requests[2]);
  if (waits_first) finish(&requests[2], how);
  run_blocking(scattered, 15);
  if (!waits_first) finish(&requests[2], how);
  third.check();
  finish(&requests[0], how);
  first.check();
  finish(&requests[1], how);
  second.check();
}

void interleaving() {
  const Dup comm;
  for (const int count : {2, 3000, 100000})
    for (int first = -1; first <= size; ++first) {  // nobody; this rank; everybody
      if (is_crowded() && count > 10000 && first > 0) continue;
      interleave(comm, count, first == rank || first == size, first + 1 + rank);
      interleave(MPI_COMM_WORLD, count, first != rank, first + 2);
    }
}

// ---------------------------------------------------------------------------------------- progress

constexpr int kTag = 7;
void send_to(int peer, int bytes) {
  Message message(peer, kTag, bytes);
  write_message(message.data, rank, kTag, 0);
  MPI_Send(message.data.data(), bytes, MPI_BYTE, peer, kTag, MPI_COMM_WORLD);
}
void receive_from(int peer, int bytes) {
  Message message(peer, kTag, bytes);
  MPI_Status status;
  MPI_Recv(message.data.data(), bytes, MPI_BYTE, peer, kTag, MPI_COMM_WORLD, &status);
  message.check_received(&status, 0);
}

/// Rank 0 waits for a message that its peer sends when the reduction is complete there.
void receive_before_wait(MPI_Comm comm, const Case& what, int bytes, int how) {
  Reduction reduction(comm, what);
  reduction.fill(1);
  MPI_Request request;
  reduction.post(&request);
  if (rank == 0 && size > 1) receive_from(1, bytes);
  finish(&request, how);
  if (rank == 1) send_to(0, bytes);
  reduction.check();
}

/// Rank 0 sends what its peer wants to have before it takes part in the reduction.
void send_before_wait(MPI_Comm comm, const Case& what, int bytes, int how) {
  Reduction reduction(comm, what);
  reduction.fill(2);
  if (rank == 1) receive_from(0, bytes);
  MPI_Request request;
  reduction.post(&request);
  if (rank == 0 && size > 1) send_to(1, bytes);
  finish(&request, how);
  reduction.check();
}

/// To be run alone: then these are the first collectives of the program.
void first() {
  receive_before_wait(MPI_COMM_WORLD, int_sum(10), 8, 0);
  send_before_wait(Dup(), int_sum(10), 1 << 20, 0);
  receive_before_wait(Dup(), int_sum(100000), 8, 0);
}
void first_send() {
  send_before_wait(MPI_COMM_WORLD, int_sum(10), 1 << 20, 0);
  receive_before_wait(Dup(), int_sum(10), 1 << 20, 0);
  send_before_wait(Dup(), int_sum(100000), 8, 0);
}

void progress() {
  const Dup old;
  int how = 0;
  for (const Collective collective : kCollectives)
    for (const int count : {1, 1000, 200000})
      for (const int bytes : {8, 1 << 20}) {
        Case what = int_sum(count);
        what.collective = collective;
        for (what.root = 0; what.root < (collective == Collective::reduce ? 2 : 1) % (size + 1);
             ++what.root) {
          receive_before_wait(old, what, bytes, ++how);
          send_before_wait(old, what, bytes, how);
          if (choose(4) != 0) continue;
          receive_before_wait(Dup(), what, bytes, how);
          send_before_wait(Dup(), what, bytes, how);
        }
      }
}

/// Whatever rank 0 is in, its part of the reduction goes on: the others need it before they let
/// rank 0 go.
void progress_in_others() {
  if (size == 1) return;
  const Dup comm, other;
  for (const int count : {5, 100000})
    for (int where = 0; where < 11; ++where) {
      Reduction reduction(comm, int_sum(count)), another(other, int_sum(count));
      reduction.fill(where);
      another.fill(where + 1);
      MPI_Request request, second = MPI_REQUEST_NULL;
      reduction.post(&request);
      std::vector<char> data(1 << 20);
      const int bytes = static_cast<int>(data.size());
      MPI_Status status;
      int flag = 0;
      const auto finish_as_others = [&](int as) {
        if (rank != 0) {
          finish(&request, as);
          reduction.check();
        }
      };
      switch (where) {
        case 0:
        case 1:
        case 2:
        case 3:
        case 4:
        case 5:
          if (rank == 0) {
            if (where == 0) MPI_Probe(1, 5, MPI_COMM_WORLD, &status);
            if (where == 1)
              for (; !flag; std::this_thread::yield())
                MPI_Iprobe(1, 5, MPI_COMM_WORLD, &flag, &status);
            if (where == 2) {
              MPI_Message message;
              MPI_Mprobe(1, 5, MPI_COMM_WORLD, &message, &status);
              MPI_Mrecv(data.data(), bytes, MPI_BYTE, &message, &status);
              break;
            }
            MPI_Irecv(data.data(), bytes, MPI_BYTE, 1, 5, MPI_COMM_WORLD, &second);
            if (where == 3)
              for (; !flag; std::this_thread::yield()) MPI_Test(&second, &flag, &status);
            if (where == 4)
              for (; !flag; std::this_thread::yield())
                MPI_Request_get_status(second, &flag, MPI_STATUS_IGNORE);
            MPI_Wait(&second, &status);
          }
          finish_as_others(where);
          if (rank == 1) MPI_Send(data.data(), bytes, MPI_BYTE, 0, 5, MPI_COMM_WORLD);
          break;
        case 6:
          if (rank == 0) MPI_Ssend(data.data(), 1, MPI_BYTE, 1, 5, MPI_COMM_WORLD);
          finish_as_others(where);
          if (rank == 1) MPI_Recv(data.data(), 1, MPI_BYTE, 0, 5, MPI_COMM_WORLD, &status);
          break;
        case 7:
          finish_as_others(where);
          MPI_Barrier(other);
          break;
        case 8:
          finish_as_others(where);
          another.call();
          another.check();
          break;
        case 9: {
          finish_as_others(where);
          const Dup third{MPI_Comm(other)};
          break;
        }
        default:
          finish_as_others(where);
          another.post(&second);
          finish(&second, rank);
          another.check();
      }
      if (rank == 0) {
        finish(&request, where);
        reduction.check();
      }
    }
}

/// The same with rank 0 in the first call on a communicator, and later ones that make more of it.
void progress_in_set_up() {
  if (size == 1) return;
  MPI_Group all;
  MPI_Comm_group(MPI_COMM_WORLD, &all);
  for (const int count : {1, 200000})
    for (const bool is_first : {true, false}) {
      MPI_Comm comm;
      MPI_Comm_create_group(MPI_COMM_WORLD, all, kTag, &comm);  // not as ready as its parent
      int one = 1, sum = 0;
      if (!is_first) MPI_Allreduce(&one, &sum, 1, MPI_INT, MPI_SUM, comm);
      Reduction pending(MPI_COMM_WORLD, int_sum(200000)), other(comm, int_sum(count));
      pending.fill(1);
      MPI_Request request;
      pending.post(&request);
      other.fill(2);
      if (rank != 0) {
        std::this_thread::sleep_for(std::chrono::milliseconds(20));
        MPI_Wait(&request, MPI_STATUS_IGNORE);
      }
      other.call();
      if (rank == 0) MPI_Wait(&request, MPI_STATUS_IGNORE);
      pending.check();
      other.check();
      MPI_Comm_free(&comm);
    }
  MPI_Group_free(&all);
}

// -------------------------------------------------------------------------------------------- late

/// The last rank posts 300 ms after the others, who see that Test does not wait for it.
void late() {
  if (size == 1) return;
  const Dup comm;
  // MPICH's, which the library has where it is another MPI of its family, too.
  const auto is_complete =
      reinterpret_cast<int (*)(MPI_Request)>(dlsym(RTLD_DEFAULT, "MPIX_Request_is_complete"));
  for (const int count : {1, 100000})
    for (int form = 0; form < 1 + HAS_PERSISTENT_REDUCTIONS; ++form)
      for (const bool asks_only : {false, true}) {
        Reduction reduction(comm, int_sum(count));
        reduction.fill(count);
        MPI_Request request;
#if HAS_PERSISTENT_REDUCTIONS
        if (form == 1) reduction.init(&request);
#endif
        char token = 0;
        if (rank == size - 1) {
          MPI_Recv(&token, 1, MPI_CHAR, 0, kTag, MPI_COMM_WORLD, MPI_STATUS_IGNORE);
          std::this_thread::sleep_for(std::chrono::milliseconds(300));
        }
        if (form == 0)
          reduction.post(&request);
        else
          MPI_Start(&request);
        const MPI_Request handle = request;
        if (rank == 0) MPI_Send(&token, 1, MPI_CHAR, size - 1, kTag, MPI_COMM_WORLD);
        if (rank != size - 1) {
          int flag = 0, before = -1;
          for (; !flag; ++before) {
            if (asks_only && is_complete != nullptr && form == 0) {
              int is_there = 0;  // it makes no progress itself
              MPI_Iprobe(MPI_ANY_SOURCE, kTag, comm, &is_there, MPI_STATUS_IGNORE);
              flag = is_complete(request);
            } else if (asks_only)
              MPI_Request_get_status(request, &flag, MPI_STATUS_IGNORE);
            else
              MPI_Test(&request, &flag, MPI_STATUS_IGNORE);
            if (!flag) EXPECT(request == handle, "the handle changed");
            if (!flag) std::this_thread::sleep_for(std::chrono::milliseconds(1));
          }
          // How many fit depends on the machine; one that waits for the peer is the only one.
          if (rank == 0) EXPECT(before >= 3, "%d calls while the peer slept", before);
        }
        if (asks_only) EXPECT(request == handle, "MPI_Request_get_status freed the request");
        MPI_Wait(&request, MPI_STATUS_IGNORE);
        reduction.check();
        if (form == 1) MPI_Request_free(&request);
      }
}

#if MPI_VERSION > 4 || (MPI_VERSION == 4 && MPI_SUBVERSION >= 1)
#define HAS_STATUS_OF_MANY 1
/// MPI_Request_get_status_all, any and some, over reductions, messages and inactive requests: they
/// drive all of them, and free none.
void asked() {
  if (size == 1) return;
  const Dup comm;
  for (const int count : {3, 50000})
    for (int how = 0; how < 3; ++how) {
      constexpr int kMany = 5;
      Reduction first(comm, int_sum(count)), second(comm, int_sum(2 * count));
      int received = -1;
      std::array<MPI_Request, kMany> requests;
      requests.fill(MPI_REQUEST_NULL);
      first.fill(how);
      second.fill(how + 1);
      std::array<MPI_Status, kMany> statuses;
      int flag = 0, index = -1, many = -1;
      std::array<int, kMany> indices{};
      const auto ask = [&] {
        if (how == 0)
          MPI_Request_get_status_all(kMany, requests.data(), &flag, statuses.data());
        else if (how == 1)
          MPI_Request_get_status_any(kMany, requests.data(), &index, &flag, statuses.data());
        else
          MPI_Request_get_status_some(kMany, requests.data(), &many, indices.data(),
                                      statuses.data());
      };
      // None is active: all of them are complete, and there is none to tell about.
      ask();
      if (how == 0) EXPECT(flag != 0, "all");
      if (how == 1) EXPECT(flag != 0 && index == MPI_UNDEFINED, "any: %d", index);
      if (how == 2) EXPECT(many == MPI_UNDEFINED, "some: %d", many);
      first.post(&requests[1]);
      MPI_Irecv(&received, 1, MPI_INT, (rank + 1) % size, kTag, MPI_COMM_WORLD, &requests[2]);
      second.post(&requests[4]);
      const auto before = requests;
      const auto are_alive = [&] {
        EXPECT(requests == before, "a handle changed while its status was asked for");
      };
      const int others = (rank + size - 1) % size;
      if (how == 0) {
        // The message comes last of all.
        MPI_Barrier(comm);
        ask();
        EXPECT(flag == 0, "all are complete though a message was not sent");
        MPI_Barrier(comm);
        MPI_Send(&rank, 1, MPI_INT, others, kTag, MPI_COMM_WORLD);
        for (flag = 0; flag == 0;) ask();
        EXPECT(statuses[2].MPI_SOURCE == (rank + 1) % size && statuses[2].MPI_TAG == kTag,
               "source %d, tag %d", statuses[2].MPI_SOURCE, statuses[2].MPI_TAG);
      } else {
        // Of the reductions alone, until both are complete; then the message.
        std::array<bool, kMany> is_complete{};
        while (!is_complete[1] || !is_complete[4]) {
          flag = many = 0;
          ask();
          are_alive();
          if (how == 1 && flag != 0) {
            EXPECT(index == 1 || index == 4, "any: %d", index);
            is_complete[static_cast<std::size_t>(index)] = true;
            // It may name the same again, for ever.
            if (!is_complete[1] || !is_complete[4]) {
              const std::size_t rest = is_complete[1] ? 4 : 1;
              for (flag = 0; flag == 0;)
                MPI_Request_get_status(requests[rest], &flag, &statuses[0]);
              is_complete[rest] = true;
            }
          }
          if (how == 2)
            for (int i = 0; i < many; ++i) {
              EXPECT(indices[static_cast<std::size_t>(i)] == 1 ||
                         indices[static_cast<std::size_t>(i)] == 4,
                     "some: %d", indices[static_cast<std::size_t>(i)]);
              is_complete[static_cast<std::size_t>(indices[static_cast<std::size_t>(i)])] = true;
            }
        }
        MPI_Barrier(comm);
        MPI_Send(&rank, 1, MPI_INT, others, kTag, MPI_COMM_WORLD);
      }
      are_alive();
      MPI_Waitall(kMany, requests.data(), statuses.data());
      EXPECT(received == (rank + 1) % size, "received %d", received);
      first.check();
      second.check();
    }
}
#endif

// -------------------------------------------------------------------------------------- persistent

#if HAS_PERSISTENT_REDUCTIONS

/// Adds an inactive one.
void add_reduction(Bag& bag, const std::shared_ptr<Reduction>& one) {
  MPI_Request request = MPI_REQUEST_NULL;
  one->init(&request);
  EXPECT(request != MPI_REQUEST_NULL, "%s_init gave no request", one->name().c_str());
  bag.add_persistent(request, [one](const MPI_Status*) { one->check(); });
}

/// Inputs are read at the start, as often as there is one.
void persistent() {
  const Dup comm;
  int how = rank;
  for_all_cases({0, 1, 3, 64, 1000, 40000, 300000}, [&](const Case& what) {
    if (choose(2) == 0) return;  // every one is run three times
    Reduction reduction(comm, what);
    reduction.fill(100);  // what nobody must ever see
    MPI_Request request = MPI_REQUEST_NULL;
    reduction.init(&request);
    const MPI_Request handle = request;
    EXPECT(handle != MPI_REQUEST_NULL, "%s_init gave no request", reduction.name().c_str());
    int flag = 0;
    MPI_Test(&request, &flag, MPI_STATUS_IGNORE);
    EXPECT(flag == 1 && request == handle, "%s: not started", reduction.name().c_str());
    for (int round = 0; round < 3; ++round) {
      reduction.fill(round);
      MPI_Start(&request);
      finish_started(&request, ++how);
      EXPECT(request == handle, "%s: the handle changed", reduction.name().c_str());
      reduction.check();
    }
    MPI_Status status = fresh_status();
    MPI_Wait(&request, &status);
    check_empty(status);
    reduction.check();
    EXPECT(request == handle, "%s: the handle changed", reduction.name().c_str());
    MPI_Request_free(&request);
    EXPECT(request == MPI_REQUEST_NULL, "%s", reduction.name().c_str());
  });
}

/// MPI_Startall of ours and others, completed by every function.
void persistent_mixed() {
  const Dup comm;
  for (int k = 0; k < kHows; ++k) {
    Bag bag;
    const auto round = std::make_shared<int>(0);
    std::vector<std::shared_ptr<Reduction>> ours;
    for (int i = 0; i < 6; ++i) {
      ours.push_back(reduction(comm, varied(i + 6 * k, size, 3000)));
      add_reduction(bag, ours.back());
      add_persistent_messages(bag, comm, 60 + i, i == 3 ? 1 << 20 : 100 * i, round);
    }
    bag.add_null();
    bag.check_exhausted();
    // Another order on every rank, see persistent_order; Intel MPI needs the same.
    if (k % 3 != 0) bag.shuffle(static_cast<std::uint64_t>(k * 16 + (is_intel() ? 0 : rank)));
    for (*round = 0; *round < 3; ++*round) {
      for (const auto& one : ours) one->fill(*round);
      bag.start_all();
      bag.complete(static_cast<How>((k + *round + rank) % kHows), (k + *round) % 2 == 0);
    }
    bag.free_all();
  }
}

/// MPI-4.1, 6.13: once initialized, persistent collectives can be started in any order, and the
/// order can differ among the processes.
void persistent_order() {
  const Dup comm;
  // There is room in shared memory for some 5000: the last ones are the MPI's, and Intel's, see
  // below, must not be.
  const int most = is_served_here() && !is_intel() ? 6000 : 2000;
  for (const int n : {2, 8, unless_crowded(most, 500)}) {
    std::vector<std::shared_ptr<Reduction>> all;
    std::vector<MPI_Request> requests(static_cast<std::size_t>(n));
    for (int i = 0; i < n; ++i) {
      all.push_back(reduction(comm, varied(i, size, n <= 8 ? 20000 : 40)));
      all.back()->init(&requests[static_cast<std::size_t>(i)]);
    }
    for (int round = 0; round < 3; ++round) {
      for (const auto& one : all) one->fill(round);
      const auto begin = static_cast<std::size_t>(n * rank / size + round);  // rotated
      for (std::size_t i = 0; i < all.size(); ++i) MPI_Start(&requests[(begin + i) % all.size()]);
      if ((rank + round) % 2 == 0) {
        MPI_Waitall(n, requests.data(), MPI_STATUSES_IGNORE);
      } else {
        for (std::size_t i = 0; i < all.size(); ++i)
          MPI_Wait(&requests[all.size() - 1 - i], MPI_STATUS_IGNORE);
      }
      for (const auto& one : all) one->check();
    }
    // One after the other, while all are alive.
    for (std::size_t i = 0; i < all.size(); i += 3) {
      all[i]->fill(9);
      MPI_Start(&requests[i]);
      MPI_Wait(&requests[i], MPI_STATUS_IGNORE);
      all[i]->check();
    }
    for (std::size_t i = 0; i < all.size(); ++i)
      MPI_Request_free(&requests[(i * 7 + static_cast<std::size_t>(rank)) % all.size()]);
    for (const MPI_Request request : requests)
      if (n % 7 != 0) EXPECT(request == MPI_REQUEST_NULL, "not freed");
  }
}

long resident_kib() {
  long kib = 0;
  std::FILE* file = std::fopen("/proc/self/status", "r");
  for (char line[200]; std::fgets(line, sizeof line, file) != nullptr;)
    if (std::sscanf(line, "VmRSS: %ld", &kib) == 1) break;
  std::fclose(file);
  return kib;
}

/// Requests come and go, and no memory with them.
void persistent_often() {
  const Dup comm;
  constexpr int kStarts = 1000000, kBatch = 1000;
  // Otherwise as many as there are in that time.
  const bool are_all = are_collectives_ours() && !is_crowded() && !std::getenv("TRIB_ENABLE");
  const double end = MPI_Wtime() + (are_all ? 60 : 3);  // seconds
  MPI_Request request;
  int in[4], out[4];
  MPI_Allreduce_init(in, out, 4, MPI_INT, MPI_SUM, comm, MPI_INFO_NULL, &request);
  long before = 0;
  int goes_on = 1, starts = 0;
  for (; goes_on; ++starts) {
    for (int k = 0; k < 4; ++k) {
      in[k] = rank + starts + k;
      out[k] = -1;
    }
    MPI_Start(&request);
    MPI_Wait(&request, MPI_STATUS_IGNORE);
    for (int k = 0; k < 4; ++k)
      EXPECT(out[k] == size * (starts + k) + size * (size - 1) / 2, "start %d: element %d is %d",
             starts, k, out[k]);
    if (starts % kBatch != kBatch - 1) continue;
    if (before == 0) before = resident_kib();
    if (rank == 0) goes_on = starts + 1 < kStarts && MPI_Wtime() < end;
    MPI_Bcast(&goes_on, 1, MPI_INT, 0, comm);
  }
  const long grown = resident_kib() - before;
  EXPECT(grown <= 1024, "%d starts: resident memory grew by %ld KiB", starts, grown);
  EXPECT(!are_all || starts == kStarts, "only %d starts", starts);
  MPI_Request_free(&request);

  for (int i = 0; i < unless_crowded(500, 100); ++i) {
    Reduction reduction(comm, varied(i, size, 500));
    MPI_Request again = MPI_REQUEST_NULL;
    reduction.init(&again);
    for (int round = 0; round < i % 3; ++round) {
      reduction.fill(i + round);
      MPI_Start(&again);
      finish_started(&again, i);
      reduction.check();
    }
    MPI_Request_free(&again);  // some never started
  }
}

/// What is freed while it runs completes all the same.
void persistent_free_active() {
  std::vector<std::shared_ptr<Reduction>> kept;  // an operation may go on until the last barrier
  const Dup comm;
  for (int i = 0; i < 12; ++i) {
    kept.push_back(reduction(comm, int_sum(i % 2 ? 20 : 50000)));
    Reduction& one = *kept.back();
    MPI_Request request;
    one.init(&request);
    one.fill(i);
    MPI_Start(&request);
    if (i % size != rank) {
      finish_started(&request, i);
      one.check();
    }
    MPI_Request_free(&request);
    EXPECT(request == MPI_REQUEST_NULL, "%s", one.name().c_str());
    if (i % 3 == 0) MPI_Barrier(comm);
  }
  for (int i = 0; i < 3; ++i) MPI_Barrier(comm);
}

/// The same with nonblocking ones, which MPI forbids and programs do. Memory does not grow.
void free_active() {
  if (!is_served_here() || size == 1) return;
  const Dup comm;
  constexpr int kBatches = 40, kBatch = 500;
  std::vector<int> sums(kBatch);
  long before = 0;
  Reduction ready(comm, int_sum(1));  // the first may be the MPI's
  MPI_Request request;
  ready.fill(0);
  ready.post(&request);
  MPI_Wait(&request, MPI_STATUS_IGNORE);
  MPI_Barrier(comm);
  const auto wait_for_all = [&] {
    for (int i = 0, sum; i < 16; ++i) {  // on every lane: those before them are done then
      MPI_Iallreduce(&rank, &sum, 1, MPI_INT, MPI_SUM, comm, &request);
      MPI_Wait(&request, MPI_STATUS_IGNORE);
    }
  };
  for (int batch = 0; batch < kBatches; ++batch) {
    std::fill(sums.begin(), sums.end(), -1);
    for (int& sum : sums) {
      MPI_Iallreduce(&batch, &sum, 1, MPI_INT, MPI_SUM, comm, &request);
      MPI_Request_free(&request);
      EXPECT(request == MPI_REQUEST_NULL, "batch %d", batch);
    }
    wait_for_all();
    for (const int sum : sums) EXPECT(sum == batch * size, "batch %d: %d", batch, sum);
    if (batch == 1) before = resident_kib();
  }
  const long grown = resident_kib() - before;
  EXPECT(grown <= 4096, "resident memory grew by %ld KiB", grown);

  // Nor where it never waits for any, but for what is under way meanwhile.
  std::vector<int> ignored(20000), in(1000), out(1000);
  for (std::size_t i = 0; i < ignored.size(); ++i) {
    MPI_Iallreduce(&rank, &ignored[i], 1, MPI_INT, MPI_SUM, comm, &request);
    MPI_Request_free(&request);
    MPI_Iallreduce(in.data(), out.data(), 1000, MPI_INT, MPI_SUM, comm, &request);
    MPI_Request_free(&request);
    if (i % 100 == 99) MPI_Barrier(comm);
  }
  wait_for_all();
  const long grown_since = resident_kib() - before - grown;
  EXPECT(grown_since <= 16384, "resident memory grew by %ld KiB more", grown_since);
}

/// Copies of requests that have come to their end are not taken for others that came since.
void stale_copies() {
  if (!is_served_here()) return;
  const Dup comm;
  MPI_Comm_set_errhandler(comm, MPI_ERRORS_RETURN);
  MPI_Comm_set_errhandler(MPI_COMM_SELF, MPI_ERRORS_RETURN);
  int sum = -1, most = -1;
  const auto expect_two = [&] {
    MPI_Request both[2];
    MPI_Iallreduce(&rank, &sum, 1, MPI_INT, MPI_SUM, comm, &both[0]);
    MPI_Iallreduce(&rank, &most, 1, MPI_INT, MPI_MAX, comm, &both[1]);
    EXPECT(both[0] != both[1], "two requests have one handle");
    MPI_Waitall(2, both, MPI_STATUSES_IGNORE);
    EXPECT(sum == size * (size - 1) / 2 && most == size - 1, "%d %d", sum, most);
  };
  MPI_Request request, copy;
  MPI_Iallreduce(&rank, &sum, 1, MPI_INT, MPI_SUM, comm, &request);  // may be the MPI's
  MPI_Wait(&request, MPI_STATUS_IGNORE);
  MPI_Barrier(comm);
  MPI_Iallreduce(&rank, &sum, 1, MPI_INT, MPI_SUM, comm, &request);
  copy = request;
  MPI_Wait(&request, MPI_STATUS_IGNORE);
  EXPECT(error_class(MPI_Request_free(&copy)) == MPI_ERR_REQUEST, "free");
  expect_two();
  MPI_Allreduce_init(&rank, &sum, 1, MPI_INT, MPI_SUM, comm, MPI_INFO_NULL, &request);
  for (const bool is_active : {false, true}) {
    copy = request;
    if (is_active) MPI_Start(&request);
    MPI_Request_free(&request);
    // One that is active is another's for as long.
    EXPECT(error_class(MPI_Start(&copy)) == MPI_ERR_REQUEST, "start");
    MPI_Request again = copy;
    EXPECT(error_class(MPI_Request_free(&again)) == MPI_ERR_REQUEST, "free");
    MPI_Barrier(comm);
    expect_two();
    MPI_Allreduce_init(&rank, &sum, 1, MPI_INT, MPI_SUM, comm, MPI_INFO_NULL, &request);
  }
  MPI_Request_free(&request);
  MPI_Comm_set_errhandler(MPI_COMM_SELF, MPI_ERRORS_ARE_FATAL);
}

/// The communicator is freed before the first start, while an operation runs, or after one.
void persistent_comm_freed() {
  for (const int count : {30, 30000})
    for (const int when : {0, 1, 2}) {
      MPI_Comm comm;
      MPI_Comm_dup(MPI_COMM_WORLD, &comm);
      MPI_Request requests[2];
      Reduction one(comm, int_sum(count)), two(comm, varied(2, size, count));
      one.init(&requests[0]);
      two.init(&requests[1]);
      if (when == 0) MPI_Comm_free(&comm);
      for (int round = 0; round < 3; ++round) {
        one.fill(round);
        two.fill(round);
        MPI_Startall(2, requests);
        if (when == 1 && round == 0) MPI_Comm_free(&comm);
        finish_started(&requests[1], round);
        finish_started(&requests[0], round);
        if (when == 2 && round == 0) MPI_Comm_free(&comm);
        one.check();
        two.check();
      }
      MPI_Request_free(&requests[0]);
      MPI_Request_free(&requests[1]);
    }
}

#endif

// ----------------------------------------------------------------------------------------- threads

void threads() {
  int provided;
  MPI_Query_thread(&provided);
  if (provided < MPI_THREAD_MULTIPLE) {
    if (rank == 0) std::printf("requests: no MPI_THREAD_MULTIPLE here\n");
    return;
  }
  const Dup comms[2];
  const auto work = [&](int index) {
    const MPI_Comm comm = comms[index];
    for (int i = 0; i < unless_crowded(60, 20); ++i) {
      Reduction one(comm, varied(i + index, size, 3000));
      one.fill(i);
      MPI_Request request;
      one.post(&request);
      finish(&request, i + index);
      one.check();
      Bag bag;
      for (int k = 0; k < 5; ++k) {
        const auto another = reduction(comm, varied(i + k, size));
        another->fill(k);
        another->post(&request);
        bag.add(request, true, false, [another](const MPI_Status*) { another->check(); });
      }
      bag.complete(static_cast<How>((i + rank) % kHows), true);
#if HAS_PERSISTENT_REDUCTIONS
      one.init(&request);
      for (int round = 0; round < 5; ++round) {
        one.fill(round);
        MPI_Start(&request);
        finish_started(&request, i + round);
        one.check();
      }
      MPI_Request_free(&request);
#endif
    }
  };
  std::thread another(work, (rank + 1) % 2);
  work(rank % 2);
  another.join();
#if HAS_PERSISTENT_REDUCTIONS
  // Of one communicator, each started by a thread of its own: in orders that nobody knows.
  const Dup common;
  std::shared_ptr<Reduction> reductions[2];
  MPI_Request requests[2];
  for (int i = 0; i < 2; ++i) {
    reductions[i] = reduction(common, varied(i, size, 3000));
    reductions[i]->init(&requests[i]);
  }
  const auto start = [&](int index) {
    for (int round = 0; round < unless_crowded(300, 30); ++round) {
      reductions[index]->fill(round);
      MPI_Start(&requests[index]);
      finish_started(&requests[index], index + round);
      reductions[index]->check();
    }
    MPI_Request_free(&requests[index]);
  };
  std::thread starter(start, (rank + 1) % 2);
  start(rank % 2);
  starter.join();
#endif
}

// ----------------------------------------------------------------------------------- communicators

void all_forms_on(MPI_Comm comm) {
  int ranks;
  MPI_Comm_size(comm, &ranks);
  Bag bag;
  std::vector<std::shared_ptr<Reduction>> all;
  for (int i = 0; i < 8; ++i) {
    MPI_Request request;
    all.push_back(reduction(comm, varied(i, ranks, 2000)));
    all.back()->fill(i);
    all.back()->post(&request);
    bag.add(request, true, false, [one = all.back()](const MPI_Status*) { one->check(); });
  }
  bag.complete(static_cast<How>(choose(kHows)), true);
  bag.free_all();
#if HAS_PERSISTENT_REDUCTIONS
  for (const auto& one : all) add_reduction(bag, one);
  for (int round = 0; round < 2; ++round) {
    for (const auto& one : all) one->fill(round);
    bag.start_all();
    bag.complete(static_cast<How>(choose(kHows)), true);
  }
  bag.free_all();
#endif
}

/// The map x -> ax + b over 32 bits.
std::uint64_t map_of(std::uint32_t a, std::uint32_t b) { return std::uint64_t{a} << 32 | b; }
/// `second` comes first. Not commutative.
std::uint64_t composed(std::uint64_t first, std::uint64_t second) {
  const auto a = static_cast<std::uint32_t>(first >> 32), b = static_cast<std::uint32_t>(first);
  return map_of(a * static_cast<std::uint32_t>(second >> 32),
                a * static_cast<std::uint32_t>(second) + b);
}
void compose(void* in, void* inout, int* count, MPI_Datatype*) {
  for (int i = 0; i < *count; ++i) {
    std::uint64_t& right = static_cast<std::uint64_t*>(inout)[i];
    right = composed(static_cast<const std::uint64_t*>(in)[i], right);
  }
}
void add_pairs(void* in, void* inout, int* count, MPI_Datatype*) {
  for (int i = 0; i < 2 * *count; ++i) static_cast<int*>(inout)[i] += static_cast<int*>(in)[i];
}

/// What no library but the MPI can do: operators and types of the program.
void user_defined(MPI_Comm comm) {
  MPI_Op then, add;
  MPI_Op_create(compose, 0, &then);
  MPI_Op_create(add_pairs, 1, &add);
  MPI_Datatype pair;
  MPI_Type_contiguous(2, MPI_INT, &pair);
  MPI_Type_commit(&pair);
  const auto map = [](int r) { return map_of(2 * static_cast<std::uint32_t>(r) + 3, 7); };
  std::uint64_t all = 0, expected = map(0);
  for (int r = 1; r < size; ++r) expected = composed(expected, map(r));
  const std::uint64_t mine = map(rank);
  std::vector<int> in(20), out(20);
  for (int form = 0; form < 1 + HAS_PERSISTENT_REDUCTIONS; ++form) {
    MPI_Request requests[2];
    const auto fill = [&](int round) {
      std::fill(in.begin(), in.end(), rank + round);
      std::fill(out.begin(), out.end(), -1);
      all = 0;
    };
    fill(0);
    if (form == 0) {
      MPI_Iallreduce(&mine, &all, 1, MPI_UINT64_T, then, comm, &requests[0]);
      MPI_Iallreduce(in.data(), out.data(), 10, pair, add, comm, &requests[1]);
    }
#if HAS_PERSISTENT_REDUCTIONS
    if (form == 1) {
      MPI_Allreduce_init(&mine, &all, 1, MPI_UINT64_T, then, comm, MPI_INFO_NULL, &requests[0]);
      MPI_Allreduce_init(in.data(), out.data(), 10, pair, add, comm, MPI_INFO_NULL, &requests[1]);
    }
#endif
    for (int round = 0; round < 1 + 2 * form; ++round) {
      if (form == 1) {
        fill(round);
        MPI_Startall(2, requests);
      }
      MPI_Waitall(2, requests, MPI_STATUSES_IGNORE);
      EXPECT(all == expected, "operator of the program: %llx, expected %llx",
             static_cast<unsigned long long>(all), static_cast<unsigned long long>(expected));
      for (const int value : out)
        EXPECT(value == size * round + size * (size - 1) / 2, "derived type: %d", value);
    }
    if (form == 1) {
      MPI_Request_free(&requests[0]);
      MPI_Request_free(&requests[1]);
    }
  }
  MPI_Type_free(&pair);
  MPI_Op_free(&then);
  MPI_Op_free(&add);
}

void intercommunicator() {
  if (size == 1) return;
  MPI_Comm local, inter;
  MPI_Comm_split(MPI_COMM_WORLD, rank % 2, rank, &local);
  MPI_Intercomm_create(local, 0, MPI_COMM_WORLD, 1 - rank % 2, 5, &inter);
  int mine = rank % 2 ? 10 : 1, result = 0, remote = 0;
  MPI_Comm_remote_size(inter, &remote);
  const int expected = remote * (rank % 2 ? 1 : 10);
  MPI_Request request;
  MPI_Iallreduce(&mine, &result, 1, MPI_INT, MPI_SUM, inter, &request);
  finish(&request, rank);
  EXPECT(result == expected, "%d, expected %d", result, expected);
#if HAS_PERSISTENT_REDUCTIONS
  MPI_Allreduce_init(&mine, &result, 1, MPI_INT, MPI_SUM, inter, MPI_INFO_NULL, &request);
  for (int i = 0; i < 3; ++i) {
    result = -1;
    MPI_Start(&request);
    finish_started(&request, rank + i);
    EXPECT(result == expected, "persistent: %d, expected %d", result, expected);
  }
  MPI_Request_free(&request);
#endif
  MPI_Comm_free(&inter);
  MPI_Comm_free(&local);
}

void communicators() {
  const Dup dup, dup_of_dup{MPI_Comm(dup)};
  all_forms_on(dup);
  all_forms_on(dup_of_dup);
  all_forms_on(MPI_COMM_WORLD);
  all_forms_on(MPI_COMM_SELF);
  for (const int key : {1, -1}) {
    MPI_Comm part;
    MPI_Comm_split(MPI_COMM_WORLD, rank % 2, key * rank, &part);
    // Both at once.
    Reduction here(part, int_sum(300)), everywhere(MPI_COMM_WORLD, int_sum(40));
    MPI_Request requests[2];
    here.fill(1);
    everywhere.fill(2);
    if (rank % 2) here.post(&requests[0]);
    everywhere.post(&requests[1]);
    if (rank % 2 == 0) here.post(&requests[0]);
    MPI_Waitall(2, requests, MPI_STATUSES_IGNORE);
    here.check();
    everywhere.check();
    all_forms_on(part);
    MPI_Comm_free(&part);
  }
  user_defined(dup);
  intercommunicator();
  all_forms_on(dup);
}

/// The communicator is freed while a reduction is pending.
void pending_comm_freed() {
  for (int i = 0; i < 16; ++i) {
    MPI_Comm comm;
    MPI_Comm_dup(MPI_COMM_WORLD, &comm);
    if (i % 2) all_forms_on(comm);  // the others' first use is their last
    Reduction pending(comm, varied(i, size, i < 8 ? 40 : 30000));
    pending.fill(i);
    MPI_Request request;
    pending.post(&request);
    MPI_Comm_free(&comm);
    EXPECT(comm == MPI_COMM_NULL, "not freed");
    if (i % 3 == 0) Dup();  // a handle that is used again
    finish(&request, i);
    pending.check();
  }
}

// ------------------------------------------------------------------------------------------ errors

/// What all MPIs find wrong. All ranks are wrong alike.
void errors() {
  MPI_Comm comm;  // not used after an error: some MPIs find it when they have begun
  int in[64] = {}, out[64] = {};
  const std::vector<int> negative(static_cast<std::size_t>(size), -1);
  MPI_Request request;
  const bool is_bare_mpich = is_mpich() && !is_intel();
  const auto expect = [&](int error, const char* what, auto call) {
    // MPICH 5.0.2 does not look at a single count. Some ranks together fail to allocate as much,
    // one alone copies to the end of its memory.
    if (is_bare_mpich && error == MPI_ERR_COUNT && size == 1) return;
    MPI_Comm_dup(MPI_COMM_WORLD, &comm);
    MPI_Comm_set_errhandler(comm, MPI_ERRORS_RETURN);
    request = MPI_REQUEST_NULL;
    const int seen = error_class(call());
    EXPECT(seen == error || (is_bare_mpich && error == MPI_ERR_COUNT && seen == MPI_ERR_OTHER),
           "%s: error class %d, expected %d", what, seen, error);
    MPI_Comm_free(&comm);
  };
  expect(MPI_ERR_COUNT, "MPI_Iallreduce",
         [&] { return MPI_Iallreduce(in, out, -1, MPI_INT, MPI_SUM, comm, &request); });
  expect(MPI_ERR_OP, "MPI_Iallreduce",
         [&] { return MPI_Iallreduce(in, out, 1, MPI_INT, MPI_OP_NULL, comm, &request); });
  expect(MPI_ERR_COUNT, "MPI_Ireduce",
         [&] { return MPI_Ireduce(in, out, -1, MPI_INT, MPI_SUM, 0, comm, &request); });
  for (const int root : {size, -7})
    expect(MPI_ERR_ROOT, "MPI_Ireduce",
           [&] { return MPI_Ireduce(in, out, 1, MPI_INT, MPI_SUM, root, comm, &request); });
  expect(MPI_ERR_COUNT, "MPI_Ireduce_scatter", [&] {
    return MPI_Ireduce_scatter(in, out, negative.data(), MPI_INT, MPI_SUM, comm, &request);
  });
  expect(MPI_ERR_COUNT, "MPI_Ireduce_scatter_block",
         [&] { return MPI_Ireduce_scatter_block(in, out, -1, MPI_INT, MPI_SUM, comm, &request); });
#if HAS_PERSISTENT_REDUCTIONS
  expect(MPI_ERR_COUNT, "MPI_Allreduce_init", [&] {
    return MPI_Allreduce_init(in, out, -1, MPI_INT, MPI_SUM, comm, MPI_INFO_NULL, &request);
  });
  expect(MPI_ERR_OP, "MPI_Allreduce_init", [&] {
    return MPI_Allreduce_init(in, out, 1, MPI_INT, MPI_OP_NULL, comm, MPI_INFO_NULL, &request);
  });
  expect(MPI_ERR_COUNT, "MPI_Reduce_init", [&] {
    return MPI_Reduce_init(in, out, -1, MPI_INT, MPI_SUM, 0, comm, MPI_INFO_NULL, &request);
  });
  for (const int root : {size, -7})
    expect(MPI_ERR_ROOT, "MPI_Reduce_init", [&] {
      return MPI_Reduce_init(in, out, 1, MPI_INT, MPI_SUM, root, comm, MPI_INFO_NULL, &request);
    });
  expect(MPI_ERR_COUNT, "MPI_Reduce_scatter_init", [&] {
    return MPI_Reduce_scatter_init(in, out, negative.data(), MPI_INT, MPI_SUM, comm, MPI_INFO_NULL,
                                   &request);
  });
  expect(MPI_ERR_COUNT, "MPI_Reduce_scatter_block_init", [&] {
    return MPI_Reduce_scatter_block_init(in, out, -1, MPI_INT, MPI_SUM, comm, MPI_INFO_NULL,
                                         &request);
  });
#endif
  all_forms_on(MPI_COMM_WORLD);  // as if nothing had been
}

// -------------------------------------------------------------------------------------------- main

struct Section {
  const char* name;
  void (*run)();
  bool (*is_faulty)() = nullptr;  ///< this MPI by itself fails: only run when named
};
constexpr Section kSections[] = {
    {"first", first},
    {"first-send", first_send},
    {"nonblocking", nonblocking},
    {"alone", alone},
    {"many", many},
    {"interleaving", interleaving},
    {"progress", progress},
    {"progress-in-others", progress_in_others},
    {"progress-in-set-up", progress_in_set_up},
    {"late", late},
#if HAS_STATUS_OF_MANY
    // MPICH's MPI_Request_get_status_some goes on for ever where nothing is complete.
    {"asked", asked, [] { return is_mpich() && !is_intel() && !is_served_here(); }},
#endif
#if HAS_PERSISTENT_REDUCTIONS
    {"persistent", persistent},
    {"persistent-mixed", persistent_mixed},
    // Intel MPI 2021.18 matches in the order of the starts: wrong results.
    {"persistent-order", persistent_order, is_intel},
    {"persistent-often", persistent_often},
    // MPICH 5.0.2, Intel MPI 2021.18: crash in a later call. Open MPI 5.0: MPI_ERR_REQUEST.
    {"persistent-free-active", persistent_free_active, [] { return true; }},
    {"free-active", free_active, [] { return true; }},
    {"stale-copies", stale_copies, [] { return true; }},
    // Open MPI 5.0: libnbc goes on to use the communicator that is no more, and crashes.
    {"persistent-comm-freed", persistent_comm_freed, is_open_mpi},
#endif
    {"threads", threads},
    {"communicators", communicators},
    // Open MPI 5.0: libnbc goes on to use the communicator that is no more, and crashes.
    {"pending-comm-freed", pending_comm_freed, is_open_mpi},
    {"errors", errors},
};

/// Says where a job hangs, before its launcher's patience ends.
constexpr unsigned kPatience = 100;  // seconds
void hangs(int) {
  char text[200];
  const int length = std::snprintf(
      text, sizeof text, "requests: rank %d of %d hangs in section %s\n", rank, size, section);
  if (write(STDERR_FILENO, text, static_cast<std::size_t>(length)) < 0) _exit(2);
  sleep(1);  // for the others to say so too
  _exit(1);
}

}  // namespace

int main(int argc, char** argv) {
  const std::vector<std::string_view> wanted(argv + 1, argv + argc);
  const auto is_named = [&](std::string_view name) {
    return std::find(wanted.begin(), wanted.end(), name) != wanted.end();
  };
  for (const std::string_view name : wanted)
    if (std::none_of(std::begin(kSections), std::end(kSections),
                     [&](const Section& s) { return name == s.name; })) {
      std::fprintf(stderr, "no such section: %s\n", std::string(name).c_str());
      return 2;
    }
  std::signal(SIGALRM, hangs);
  alarm(kPatience);
  int provided;
  MPI_Init_thread(&argc, &argv,
                  wanted.empty() || is_named("threads") ? MPI_THREAD_MULTIPLE : MPI_THREAD_SINGLE,
                  &provided);
  rank = world_rank();
  size = world_size();
  bool is_first = true;
  for (const Section& one : kSections) {
    if (!wanted.empty() && !is_named(one.name)) continue;
    if (wanted.empty() && one.is_faulty != nullptr && one.is_faulty()) {
      if (rank == 0) std::printf("requests: this MPI fails in %s by itself\n", one.name);
      continue;
    }
    if (!is_first) MPI_Barrier(MPI_COMM_WORLD);
    is_first = false;
    section = one.name;
    const double begin = MPI_Wtime();
    one.run();
    if (rank == 0 && std::getenv("REQUESTS_TIMES"))
      std::fprintf(stderr, "%-20s %.2f s\n", one.name, MPI_Wtime() - begin);
  }
  section = "end";
  long mine = checks, all = 0;
  MPI_Reduce(&mine, &all, 1, MPI_LONG, MPI_SUM, 0, MPI_COMM_WORLD);
  if (rank == 0) std::printf("requests: %ld checks\n", all);
  MPI_Finalize();
}
