// SPDX-License-Identifier: BSD-3-Clause
// Messages from and to GPU buffers through an MPI that here knows nothing of GPUs: every kind of
// send and receive, blocking, nonblocking and persistent, types with gaps, messages shorter than
// their buffers, packed ones, thousands at once, several threads, errors. Bytes that no message
// brings must stay as they are: around buffers, in the gaps of a type, behind a short message.
//   gpu_messages [host]    host: all in host memory, which needs neither a GPU nor Tributary
#include <algorithm>
#include <cstdint>
#include <functional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "gpu_buffer.hpp"

#if MPI_VERSION >= 4 || (defined(OMPI_MAJOR_VERSION) && OMPI_MAJOR_VERSION >= 5)
#define HAS_ISENDRECV 1
#else
#define HAS_ISENDRECV 0
#endif

namespace {

long calls;
bool is_all_on_host;
int rank, size, next, previous;

Kind kind(Kind wanted) { return is_all_on_host ? Kind::host : wanted; }

/// What a rank sends.
int value(int sender, std::size_t i, int round) {
  return sender * 1000003 + static_cast<int>(i) * 7 + round * 101 + 1;
}

/// A buffer of some elements of a type, and what its data should be.
class Elements {
 public:
  Elements(const Type& type, std::size_t count, Kind its_kind, unsigned char fill = 0x5a)
      : type_(type),
        shift_(-type.first(count)),
        buffer_(type.bytes(count), fill, kind(its_kind)),
        expected_(buffer_.before) {}

  /// The first `count` elements are to be those that `sender` sends.
  void put(std::vector<unsigned char>& bytes, std::size_t count, int sender, int round) const {
    for (std::size_t i = 0; i < count; ++i)
      for (std::size_t part = 0; part < type_.at.size(); ++part) {
        const int number = value(sender, i * type_.at.size() + part, round);
        std::memcpy(&bytes[static_cast<std::size_t>(static_cast<std::ptrdiff_t>(Buffer::kGuard) +
                                                    shift_ + type_.place(i, part))],
                    &number, sizeof number);
      }
  }
  void fill(std::size_t count, int sender, int round) {
    put(buffer_.before, count, sender, round);
    expected_ = buffer_.before;
  }
  void expect(std::size_t count, int sender, int round) { put(expected_, count, sender, round); }
  void expect_int(std::ptrdiff_t place, int number) {
    std::memcpy(&expected_[static_cast<std::size_t>(static_cast<std::ptrdiff_t>(Buffer::kGuard) +
                                                    shift_ + place)],
                &number, sizeof number);
  }
  void* ready() {
    address_ = static_cast<char*>(buffer_.ready()) + shift_;
    return address_;
  }
  void* address() const { return address_; }
  void check(const std::string& what, const char* which) const {
    expect_bytes(what.c_str(), which, buffer_.now(), expected_);
  }

 private:
  const Type& type_;
  std::ptrdiff_t shift_;
  Buffer buffer_;
  std::vector<unsigned char> expected_;
  void* address_ = nullptr;
};

void wait(MPI_Request& request, int way, MPI_Status* status) {
  int flag = 0, index, done = 0;
  switch (way % 7) {
    case 0:
      MPI_Wait(&request, status);
      break;
    case 1:
      while (!flag) MPI_Test(&request, &flag, status);
      break;
    case 2:
      MPI_Waitall(1, &request, status == MPI_STATUS_IGNORE ? MPI_STATUSES_IGNORE : status);
      break;
    case 3:
      MPI_Waitany(1, &request, &index, status);
      break;
    case 4:
      while (!flag) MPI_Testany(1, &request, &index, &flag, status);
      break;
    case 5:
      while (done == 0)
        MPI_Testsome(1, &request, &done, &index,
                     status == MPI_STATUS_IGNORE ? MPI_STATUSES_IGNORE : status);
      break;
    default:
      while (!flag) MPI_Request_get_status(request, &flag, status);
      MPI_Wait(&request, MPI_STATUS_IGNORE);
  }
}

// --------------------------------------------------------------------------------- sends, receives

struct Message {
  void* data;
  int count;
  MPI_Datatype type;
  int peer, tag;
  bool is_large;
};

#if HAS_LARGE
#define CALL(Name, message, ...)                                                        \
  ((message).is_large ? MPI_##Name##_c((message).data, (message).count, (message).type, \
                                       (message).peer, (message).tag, __VA_ARGS__)      \
                      : MPI_##Name((message).data, (message).count, (message).type,     \
                                   (message).peer, (message).tag, __VA_ARGS__))
#else
#define CALL(Name, message, ...)                                                             \
  MPI_##Name((message).data, (message).count, (message).type, (message).peer, (message).tag, \
             __VA_ARGS__)
#endif

struct Sender {
  const char* name;
  /// Blocking ones leave the request as it is.
  std::function<void(const Message&, MPI_Request*)> send;
  bool is_persistent = false;
};
#define BLOCKING_SENDER(Name) \
  {"MPI_" #Name, [](const Message& m, MPI_Request*) { CALL(Name, m, MPI_COMM_WORLD); }}
#define SENDER(Name) \
  {"MPI_" #Name,     \
   [](const Message& m, MPI_Request* request) { CALL(Name, m, MPI_COMM_WORLD, request); }}
#define PERSISTENT_SENDER(Name) \
  {"MPI_" #Name,                \
   [](const Message& m, MPI_Request* request) { CALL(Name, m, MPI_COMM_WORLD, request); }, true}

const Sender kSenders[] = {
    BLOCKING_SENDER(Send),
    BLOCKING_SENDER(Ssend),
    BLOCKING_SENDER(Bsend),
    BLOCKING_SENDER(Rsend),
    SENDER(Isend),
    SENDER(Issend),
    SENDER(Ibsend),
    SENDER(Irsend),
    PERSISTENT_SENDER(Send_init),
    PERSISTENT_SENDER(Ssend_init),
    PERSISTENT_SENDER(Bsend_init),
    PERSISTENT_SENDER(Rsend_init),
};

/// Round the ring: the receive is posted first, on all ranks, so that ready sends are right.
void one_message(const Sender& sender, const Type& type, int count, int extra, Kind from, Kind to,
                 bool is_persistent_receive, int way) {
  const bool is_large = HAS_LARGE && way % 3 == 0;
  const std::string what = std::string(sender.name) + (is_large ? "_c" : "") + ", " +
                           std::to_string(count) + " of " + type.name + ", room for " +
                           std::to_string(extra) + " more, way " + std::to_string(way);
  const int rounds = sender.is_persistent ? 3 : 1;
  const auto sent = static_cast<std::size_t>(count), room = static_cast<std::size_t>(count + extra);
  Elements out(type, sent, from, 0xa5), in(type, room, to);
  MPI_Request receive = MPI_REQUEST_NULL, send = MPI_REQUEST_NULL;
  const Message incoming{in.ready(), count + extra, type.handle, previous, 3, is_large};
  const Message outgoing{out.ready(), count, type.handle, next, 3, is_large};
  if (is_persistent_receive) CALL(Recv_init, incoming, MPI_COMM_WORLD, &receive);
  if (sender.is_persistent) sender.send(outgoing, &send);
  for (int round = 0; round < rounds; ++round) {
    out.fill(sent, rank, round);
    out.ready();
    if (is_persistent_receive)
      MPI_Start(&receive);
    else
      CALL(Irecv, incoming, MPI_COMM_WORLD, &receive);
    MPI_Barrier(MPI_COMM_WORLD);
    if (!sender.is_persistent)
      sender.send(outgoing, &send);
    else if (round == 1)
      MPI_Startall(1, &send);
    else
      MPI_Start(&send);
    MPI_Status status;
    wait(receive, way + round, &status);
    in.expect(sent, previous, round);
    in.check(what, "received");
    int arrived = -1;
    MPI_Get_count(&status, type.handle, &arrived);
    CHECK(arrived == count && status.MPI_SOURCE == previous && status.MPI_TAG == 3,
          "%s: %d from %d", what.c_str(), arrived, status.MPI_SOURCE);
    if (send != MPI_REQUEST_NULL) wait(send, way + round + 3, MPI_STATUS_IGNORE);
    out.check(what, "sent");
    CHECK((send != MPI_REQUEST_NULL) == sender.is_persistent, "%s", what.c_str());
    CHECK((receive != MPI_REQUEST_NULL) == is_persistent_receive, "%s", what.c_str());
  }
  if (receive != MPI_REQUEST_NULL) MPI_Request_free(&receive);
  if (send != MPI_REQUEST_NULL) MPI_Request_free(&send);
  calls += rounds;
}

Kind kind_of(int turn, bool is_receiver) {
  constexpr Kind kKinds[][2] = {{Kind::device, Kind::device},
                                {Kind::device, Kind::host},
                                {Kind::host, Kind::device},
                                {Kind::device, Kind::device},
                                {Kind::pinned, Kind::device}};
  return kKinds[turn % 5][is_receiver];
}

void all_sends(const std::vector<Type>& types) {
  int turn = 0;
  for (const Type& type : types)
    for (const Sender& sender : kSenders)
      for (const int count : {0, 1, 6, 5000})
        for (const int extra : {0, 5}) {
          ++turn;
          one_message(sender, type, count, extra, kind_of(turn, false), kind_of(turn, true),
                      turn % 3 == 0, turn);
        }
  one_message(kSenders[4], types[0], 2000000, 10, Kind::device, Kind::device, false, 0);
}

/// Those that receive at once, or both ways.
void all_receives(const std::vector<Type>& types) {
  int turn = 0;
  for (const Type& type : types)
    for (const std::size_t count : {std::size_t{0}, std::size_t{1}, std::size_t{800}})
      for (int which = 0; which < 8; ++which)
        for (int kinds = 0; kinds < 5; ++kinds) {
          const std::size_t room = count + 3;
          const int n = static_cast<int>(count), most = static_cast<int>(room);
          Elements out(type, count, kind_of(kinds, false), 0xa5),
              in(type, room, kind_of(kinds, true));
          out.fill(count, rank, which);
          void* const from = out.ready();
          void* const to = in.ready();
          const MPI_Datatype handle = type.handle;
          MPI_Request request = MPI_REQUEST_NULL, other = MPI_REQUEST_NULL;
          MPI_Message message;
          MPI_Status status;
          const char* name = "";
          ++turn;
          switch (which) {
            case 0:
              name = "MPI_Recv";
              MPI_Isend(from, n, handle, next, 4, MPI_COMM_WORLD, &other);
              MPI_Recv(to, most, handle, MPI_ANY_SOURCE, MPI_ANY_TAG, MPI_COMM_WORLD,
                       MPI_STATUS_IGNORE);
              break;
            case 1:
              name = "MPI_Mrecv";
              MPI_Isend(from, n, handle, next, 4, MPI_COMM_WORLD, &other);
              MPI_Mprobe(previous, 4, MPI_COMM_WORLD, &message, &status);
              MPI_Mrecv(to, most, handle, &message, MPI_STATUS_IGNORE);
              break;
            case 2:
              name = "MPI_Imrecv";
              MPI_Isend(from, n, handle, next, 4, MPI_COMM_WORLD, &other);
              MPI_Mprobe(previous, 4, MPI_COMM_WORLD, &message, &status);
              MPI_Imrecv(to, most, handle, &message, &request);
              wait(request, turn, MPI_STATUS_IGNORE);
              break;
            case 3:
              name = "MPI_Sendrecv";
              MPI_Sendrecv(from, n, handle, next, 4, to, most, handle, previous, 4, MPI_COMM_WORLD,
                           turn % 2 ? &status : MPI_STATUS_IGNORE);
              break;
#if HAS_ISENDRECV
            case 4:
              name = "MPI_Isendrecv";
              MPI_Isendrecv(from, n, handle, next, 4, to, most, handle, previous, 4, MPI_COMM_WORLD,
                            &request);
              wait(request, turn, MPI_STATUS_IGNORE);
              break;
#endif
            case 5:
            case 6: {
              // In one buffer. MPICH 5.0.2: the nonblocking one goes wrong where types have gaps.
              if (which == 6 && type.handle != MPI_INT) continue;
              Elements both(type, count, kind_of(kinds, true));
              both.fill(count, rank, which);
              if (which == 5) {
                MPI_Sendrecv_replace(both.ready(), n, handle, next, 4, previous, 4, MPI_COMM_WORLD,
                                     MPI_STATUS_IGNORE);
              } else {
#if HAS_ISENDRECV
                MPI_Isendrecv_replace(both.ready(), n, handle, next, 4, previous, 4, MPI_COMM_WORLD,
                                      &request);
                wait(request, turn, MPI_STATUS_IGNORE);
#else
                continue;
#endif
              }
              both.expect(count, previous, which);
              both.check(which == 5 ? "MPI_Sendrecv_replace" : "MPI_Isendrecv_replace", type.name);
              ++calls;
              continue;
            }
            case 7:
              name = "MPI_Recv from nobody";
              MPI_Recv(to, most, handle, MPI_PROC_NULL, 4, MPI_COMM_WORLD, &status);
              MPI_Send(from, n, handle, MPI_PROC_NULL, 4, MPI_COMM_WORLD);
              MPI_Irecv(to, most, handle, MPI_PROC_NULL, 4, MPI_COMM_WORLD, &request);
              wait(request, turn, &status);
              break;
            default:
              continue;
          }
          MPI_Wait(&other, MPI_STATUS_IGNORE);
          if (which != 7) in.expect(count, previous, which);
          const std::string what = std::string(name) + ", " + std::to_string(count) + " of " +
                                   type.name + ", kinds " + std::to_string(kinds);
          in.check(what, "received");
          out.check(what, "sent");
          ++calls;
        }
}

// ----------------------------------------------------------------------------------- one of a kind

/// The columns of a matrix come in one message each, while others write between them.
void columns() {
  constexpr int kRows = 500, kColumns = 6;
  MPI_Datatype vector, column;
  MPI_Type_vector(kRows, 1, kColumns, MPI_INT, &vector);
  MPI_Type_create_resized(vector, 0, 4, &column);
  MPI_Type_commit(&column);
  Buffer matrix(4 * kRows * kColumns, 0x5a, kind(Kind::device));
  Buffer out(4 * kRows, 0, kind(Kind::device));
  for (int i = 0; i < kRows; ++i) out.set(4 * i, value(rank, static_cast<std::size_t>(i), 0));
  char* const at = static_cast<char*>(matrix.ready());
  void* const from = out.ready();
  std::vector<unsigned char> expected = matrix.before;
  MPI_Request requests[kColumns];
  int count = 0;
  for (const int c : {4, 0, 2})
    MPI_Irecv(at + 4 * c, 1, column, previous, c, MPI_COMM_WORLD, &requests[count++]);
  // Columns 1 and 3 are nobody's but ours.
  for (int i = 0; i < kRows; ++i)
    for (const int c : {1, 3}) {
      const int number = -i * 10 - c, place = 4 * (i * kColumns + c);
      if (is_all_on_host)
        std::memcpy(at + place, &number, 4);
      else
        Gpu::get().copy(at + place, &number, 4);
      std::memcpy(&expected[Buffer::kGuard + static_cast<std::size_t>(place)], &number, 4);
    }
  MPI_Barrier(MPI_COMM_WORLD);
  for (const int c : {0, 2, 4}) {
    MPI_Isend(from, kRows, MPI_INT, next, c, MPI_COMM_WORLD, &requests[count++]);
    for (int i = 0; i < kRows; ++i) {
      const int number = value(previous, static_cast<std::size_t>(i), 0);
      std::memcpy(&expected[Buffer::kGuard + 4 * static_cast<std::size_t>(i * kColumns + c)],
                  &number, 4);
    }
  }
  MPI_Waitall(count, requests, MPI_STATUSES_IGNORE);
  expect_bytes("columns of a matrix", "received", matrix.now(), expected);
  // All at once: elements of the type lie one between the other.
  Buffer whole(4 * kRows * kColumns, 0x5a, kind(Kind::device));
  MPI_Sendrecv(at, kColumns, column, next, 9, whole.ready(), kColumns, column, previous, 9,
               MPI_COMM_WORLD, MPI_STATUS_IGNORE);
  for (int i = 0; i < kRows; ++i)
    for (const int c : {0, 2, 4}) {
      const int number = value((previous + size - 1) % size, static_cast<std::size_t>(i), 0);
      std::memcpy(&expected[Buffer::kGuard + 4 * static_cast<std::size_t>(i * kColumns + c)],
                  &number, 4);
    }
  expect_bytes("all columns", "received", whole.now(), expected);
  MPI_Type_free(&column);
  MPI_Type_free(&vector);
  calls += 7;
}

/// Types that hold addresses themselves, for both buffers of one call.
/// A column goes to the right, and comes from the left into the same matrix by another type; at the
/// ends there is no neighbour, from whom nothing comes.
void borders() {
  constexpr int kRows = 40, kColumns = 6;
  const auto column = [](int which) {
    const int sizes[] = {kRows, kColumns}, part[] = {kRows, 1}, begin[] = {0, which};
    MPI_Datatype type;
    MPI_Type_create_subarray(2, sizes, part, begin, MPI_ORDER_C, MPI_INT, &type);
    MPI_Type_commit(&type);
    return type;
  };
  MPI_Datatype last = column(kColumns - 2), first = column(0);
  const int left = rank > 0 ? rank - 1 : MPI_PROC_NULL;
  const int right = rank + 1 < size ? rank + 1 : MPI_PROC_NULL;
  for (const bool is_blocking : {true, false}) {
    Buffer matrix(4 * kRows * kColumns, 0x5a, kind(Kind::device));
    for (int i = 0; i < kRows * kColumns; ++i)
      matrix.set(4 * i, value(rank, static_cast<std::size_t>(i), 10));
    std::vector<unsigned char> expected = matrix.before;
    for (int row = 0; row < kRows && rank > 0; ++row) {
      const int place = row * kColumns;
      const int number = value(left, static_cast<std::size_t>(place + kColumns - 2), 10);
      std::memcpy(&expected[Buffer::kGuard + 4 * static_cast<std::size_t>(place)], &number, 4);
    }
    Buffer other(4 * kRows * kColumns, 0xa5, kind(Kind::device));  // for copies to hold once
    MPI_Send(other.ready(), kRows * kColumns, MPI_INT, MPI_PROC_NULL, 0, MPI_COMM_WORLD);
    void* const at = matrix.ready();
    if (is_blocking) {
      MPI_Sendrecv(at, 1, last, right, 10, at, 1, first, left, 10, MPI_COMM_WORLD,
                   MPI_STATUS_IGNORE);
    } else {
#if HAS_ISENDRECV
      MPI_Request request;
      MPI_Isendrecv(at, 1, last, right, 10, at, 1, first, left, 10, MPI_COMM_WORLD, &request);
      MPI_Wait(&request, MPI_STATUS_IGNORE);
#else
      continue;
#endif
    }
    expect_bytes(is_blocking ? "borders, MPI_Sendrecv" : "borders, MPI_Isendrecv", "matrix",
                 matrix.now(), expected);
    ++calls;
  }
  MPI_Type_free(&last);
  MPI_Type_free(&first);
}

#if HAS_ISENDRECV
/// There and back, in lengths that differ from call to call, into what may be larger.
void exchanged(const std::vector<Type>& types) {
  constexpr std::size_t kMost = 3000;
  for (const std::size_t count : {6u, 1000u, 1u, 300u, 3000u, 2u}) {
    const Type& type = types[0];
    Elements out(type, count, Kind::device), in(type, kMost, Kind::device),
        both(type, count, Kind::device);
    const int n = static_cast<int>(count);
    out.fill(count, rank, n);
    both.fill(count, rank, n);
    in.fill(kMost, rank, 1);
    MPI_Request requests[2];
    MPI_Isendrecv(out.ready(), n, type.handle, next, 13, in.ready(), kMost, type.handle, previous,
                  13, MPI_COMM_WORLD, &requests[0]);
    MPI_Isendrecv_replace(both.ready(), n, type.handle, next, 14, previous, 14, MPI_COMM_WORLD,
                          &requests[1]);
    MPI_Waitall(2, requests, MPI_STATUSES_IGNORE);
    in.expect(count, previous, n);
    both.expect(count, previous, n);
    in.check("MPI_Isendrecv, lengths that differ", type.name);
    both.check("MPI_Isendrecv_replace, lengths that differ", type.name);
    calls += 2;
  }
}
#endif

/// Behind a message that is shorter than its buffer others write meanwhile, whatever its type is.
void short_messages(const std::vector<Type>& types) {
  for (const Type& type : types) {
    constexpr std::size_t kRoom = 30, kSent = 11;
    Elements out(type, kSent, Kind::device, 0xa5), in(type, kRoom, Kind::device);
    out.fill(kSent, rank, 11);
    auto* const to = static_cast<char*>(in.ready());
    MPI_Request request;
    MPI_Irecv(to, kRoom, type.handle, previous, 11, MPI_COMM_WORLD, &request);
    const auto place = type.place(kRoom - 1, 0);
    const int number = value(rank, kRoom - 1, 12);
    if (is_all_on_host)
      std::memcpy(to + place, &number, 4);
    else
      Gpu::get().copy(to + place, &number, 4);
    MPI_Barrier(MPI_COMM_WORLD);
    MPI_Send(out.ready(), kSent, type.handle, next, 11, MPI_COMM_WORLD);
    MPI_Wait(&request, MPI_STATUS_IGNORE);
    in.expect(kSent, previous, 11);
    in.expect_int(place, number);
    in.check("short message", type.name);
    ++calls;
  }
}

void bottom() {
  Buffer out(8, 0xa5, kind(Kind::device)), in(8, 0x5a, kind(Kind::device));
  out.set(4, value(rank, 0, 0));
  const auto absolute = [](void* address) {
    MPI_Datatype type;
    int length = 1;
    MPI_Aint place;
    MPI_Get_address(static_cast<char*>(address) + 4, &place);
    MPI_Type_create_hindexed(1, &length, &place, MPI_INT, &type);
    MPI_Type_commit(&type);
    return type;
  };
  MPI_Datatype from = absolute(out.ready()), to = absolute(in.ready());
  MPI_Sendrecv(MPI_BOTTOM, 1, from, next, 5, MPI_BOTTOM, 1, to, previous, 5, MPI_COMM_WORLD,
               MPI_STATUS_IGNORE);
  MPI_Type_free(&from);
  MPI_Type_free(&to);
  std::vector<unsigned char> expected = in.before;
  const int number = value(previous, 0, 0);
  std::memcpy(&expected[Buffer::kGuard + 4], &number, 4);
  expect_bytes("MPI_Sendrecv at MPI_BOTTOM", "received", in.now(), expected);
  ++calls;
}

/// Thousands at once, completed in lists with requests that are of the MPI alone.
void thousands() {
  constexpr int kMessages = 3000, kInts = 12;
  Buffer out(4 * kInts * kMessages, 0xa5, kind(Kind::device));
  Buffer in(4 * kInts * kMessages, 0x5a, kind(Kind::device));
  std::vector<int> plain_out(kMessages), plain_in(kMessages);
  std::vector<unsigned char> expected = in.before;
  for (int m = 0; m < kMessages; ++m)
    for (int i = 0; i <= m % kInts; ++i) {
      out.set(4 * (m * kInts + i), value(rank, static_cast<std::size_t>(i), m));
      const int number = value(previous, static_cast<std::size_t>(i), m);
      std::memcpy(&expected[Buffer::kGuard + 4 * static_cast<std::size_t>(m * kInts + i)], &number,
                  4);
    }
  for (int way = 0; way < 5; ++way) {
    char* const from = static_cast<char*>(out.ready());
    char* const to = static_cast<char*>(in.ready());
    std::vector<MPI_Request> requests;
    MPI_Request request;
    for (int m = 0; m < kMessages; ++m) {
      MPI_Irecv(to + 4 * kInts * m, kInts, MPI_INT, previous, m, MPI_COMM_WORLD, &request);
      requests.push_back(request);
      if (m % 7 != 0) continue;
      MPI_Irecv(&plain_in[static_cast<std::size_t>(m)], 1, MPI_INT, previous, kMessages + m,
                MPI_COMM_WORLD, &request);
      requests.push_back(request);
    }
    for (int m = kMessages - 1; m >= 0; --m) {
      MPI_Isend(from + 4 * kInts * m, m % kInts + 1, MPI_INT, next, m, MPI_COMM_WORLD, &request);
      requests.push_back(request);
      if (m % 7 != 0) continue;
      plain_out[static_cast<std::size_t>(m)] = rank + m;
      MPI_Isend(&plain_out[static_cast<std::size_t>(m)], 1, MPI_INT, next, kMessages + m,
                MPI_COMM_WORLD, &request);
      requests.push_back(request);
    }
    const int count = static_cast<int>(requests.size());
    std::vector<int> indices(requests.size());
    std::vector<MPI_Status> statuses(requests.size());
    int flag = 0, done = 0, index = 0;
    switch (way) {
      case 0:
        MPI_Waitall(count, requests.data(), MPI_STATUSES_IGNORE);
        break;
      case 1:
        while (!flag) MPI_Testall(count, requests.data(), &flag, statuses.data());
        break;
      case 2:
        while (done != MPI_UNDEFINED)
          MPI_Waitsome(count, requests.data(), &done, indices.data(), MPI_STATUSES_IGNORE);
        break;
      case 3:
        while (done != MPI_UNDEFINED)
          MPI_Testsome(count, requests.data(), &done, indices.data(), statuses.data());
        break;
      default:  // the order of a program that looks at the last first
        for (int at = count; at > 0; at -= std::min(at, 500))
          for (index = 0; index != MPI_UNDEFINED;)
            MPI_Waitany(std::min(at, 500), requests.data() + std::max(at - 500, 0), &index,
                        MPI_STATUS_IGNORE);
    }
    const std::string what = "thousands, way " + std::to_string(way);
    expect_bytes(what.c_str(), "received", in.now(), expected);
    for (int m = 0; m < kMessages; m += 7)
      CHECK(plain_in[static_cast<std::size_t>(m)] == previous + m, "%s: %d", what.c_str(), m);
    calls += 2 * kMessages;
  }
}

void freed_and_cancelled() {
  Buffer out(4000, 0, kind(Kind::device)), in(4000, 0x5a, kind(Kind::device));
  for (int i = 0; i < 1000; ++i) out.set(4 * i, value(rank, static_cast<std::size_t>(i), 8));
  std::vector<unsigned char> expected = in.before;
  MPI_Request request;
  // A send that is freed while it is under way.
  MPI_Issend(out.ready(), 1000, MPI_INT, next, 11, MPI_COMM_WORLD, &request);
  MPI_Request_free(&request);
  CHECK(request == MPI_REQUEST_NULL, "MPI_Request_free");
  MPI_Barrier(MPI_COMM_WORLD);
  void* const to = in.ready();
  MPI_Recv(to, 1000, MPI_INT, previous, 11, MPI_COMM_WORLD, MPI_STATUS_IGNORE);
  for (int i = 0; i < 1000; ++i) {
    const int number = value(previous, static_cast<std::size_t>(i), 8);
    std::memcpy(&expected[Buffer::kGuard + 4 * static_cast<std::size_t>(i)], &number, 4);
  }
  expect_bytes("freed send", "received", in.now(), expected);
  // A receive that is cancelled.
  MPI_Irecv(to, 1000, MPI_INT, previous, 12, MPI_COMM_WORLD, &request);
  MPI_Cancel(&request);
  MPI_Status status;
  MPI_Wait(&request, &status);
  int is_cancelled = 0;
  MPI_Test_cancelled(&status, &is_cancelled);
  CHECK(is_cancelled, "MPI_Cancel");
  expect_bytes("cancelled receive", "received", in.now(), expected);
  // An inactive persistent request among others.
  MPI_Request list[2];
  MPI_Recv_init(to, 10, MPI_INT, previous, 13, MPI_COMM_WORLD, &list[0]);
  MPI_Irecv(static_cast<char*>(to) + 400, 10, MPI_INT, previous, 14, MPI_COMM_WORLD, &list[1]);
  MPI_Send(out.ready(), 10, MPI_INT, next, 14, MPI_COMM_WORLD);
  MPI_Waitall(2, list, MPI_STATUSES_IGNORE);
  std::memcpy(&expected[Buffer::kGuard + 400], &expected[Buffer::kGuard], 40);
  expect_bytes("inactive persistent receive", "received", in.now(), expected);
  MPI_Request_free(&list[0]);
  MPI_Barrier(MPI_COMM_WORLD);
  calls += 4;
}

void hear(MPI_Comm*, int*, ...) {}

/// One message of a list is too long for its buffer: the others must come all the same.
void errors() {
  MPI_Comm comm;
  MPI_Comm_dup(MPI_COMM_WORLD, &comm);
  // MPICH 5.0.2 asks MPI_COMM_WORLD's handler in calls on lists.
  for (const MPI_Comm each : {comm, MPI_COMM_WORLD})
    MPI_Comm_set_errhandler(each, MPI_ERRORS_RETURN);
  Buffer out(400, 0, kind(Kind::device)), in(400, 0x5a, kind(Kind::device));
  for (int i = 0; i < 100; ++i) out.set(4 * i, value(rank, static_cast<std::size_t>(i), 9));
  char* const from = static_cast<char*>(out.ready());
  char* const to = static_cast<char*>(in.ready());
  MPI_Request requests[3];
  MPI_Status statuses[3];
  for (int m = 0; m < 3; ++m)
    MPI_Irecv(to + 100 * m, m == 1 ? 5 : 20, MPI_INT, previous, m, comm, &requests[m]);
  MPI_Barrier(comm);
  for (int m = 0; m < 3; ++m) MPI_Send(from + 100 * m, 20, MPI_INT, next, m, comm);
  std::vector<unsigned char> expected = in.before;
  int result = MPI_SUCCESS;
  for (int attempt = 0; attempt < 3; ++attempt) {
    const int its = MPI_Waitall(3, requests, statuses);
    if (its != MPI_SUCCESS) result = its;
  }
  CHECK(error_class(result) == MPI_ERR_IN_STATUS, "MPI_Waitall: %s", error_text(result).c_str());
  for (const int m : {0, 2})
    for (int i = 0; i < 20; ++i) {
      const int number = value(previous, static_cast<std::size_t>(25 * m + i), 9);
      std::memcpy(&expected[Buffer::kGuard + static_cast<std::size_t>(100 * m + 4 * i)], &number,
                  4);
    }
  // Of the message that did not fit, the buffer may hold a part.
  const auto found = in.now();
  std::copy_n(&found[Buffer::kGuard + 100], 20, &expected[Buffer::kGuard + 100]);
  expect_bytes("truncated message", "received", found, expected);
  if (size > 1) {
    // Wrong arguments are the MPI's business.
    CHECK(MPI_Send(from, -1, MPI_INT, next, 0, comm) != MPI_SUCCESS, "negative count");
    CHECK(MPI_Bcast(from, 1, MPI_DATATYPE_NULL, 0, comm) != MPI_SUCCESS, "no type");
  }
  // So they are where the program's own handler returns, and MPICH 5.0.2 says MPI_SUCCESS.
  MPI_Errhandler own;
  MPI_Comm_create_errhandler(hear, &own);
  MPI_Comm_set_errhandler(comm, own);
  MPI_Status status;
  std::memset(&status, 0x3f, sizeof status);
  MPI_Request request = MPI_REQUEST_NULL;
  expected = in.now();
  MPI_Bcast(to, 100, MPI_INT, size, comm);
  MPI_Recv(to, 100, MPI_INT, previous, -5, comm, &status);
  MPI_Irecv(to, 100, MPI_INT, previous, -5, comm, &request);
  expect_bytes("refused call", "buffer", in.now(), expected);
  MPI_Errhandler_free(&own);
  MPI_Comm_set_errhandler(MPI_COMM_WORLD, MPI_ERRORS_ARE_FATAL);
  MPI_Comm_free(&comm);
  calls += 6;
}

/// MPI_Pack and MPI_Unpack, and their relatives.
struct Packing {
  const char* name;
  int (*pack)(const void* in, int count, MPI_Datatype type, void* out, int bytes, MPI_Aint& at);
  int (*unpack)(const void* in, int bytes, MPI_Aint& at, void* out, int count, MPI_Datatype type);
};

#define NATIVE(...) (__VA_ARGS__, MPI_COMM_WORLD)
#define EXTERNAL(...) ("external32", __VA_ARGS__)
#define PACKING(suffix, Position, ARGUMENTS)                                                  \
  {"MPI_[Un]pack" #suffix,                                                                    \
   [](const void* in, int count, MPI_Datatype type, void* out, int bytes, MPI_Aint& at) {     \
     auto position = static_cast<Position>(at);                                               \
     const int result = MPI_Pack##suffix ARGUMENTS(in, count, type, out, bytes, &position);   \
     at = static_cast<MPI_Aint>(position);                                                    \
     return result;                                                                           \
   },                                                                                         \
   [](const void* in, int bytes, MPI_Aint& at, void* out, int count, MPI_Datatype type) {     \
     auto position = static_cast<Position>(at);                                               \
     const int result = MPI_Unpack##suffix ARGUMENTS(in, bytes, &position, out, count, type); \
     at = static_cast<MPI_Aint>(position);                                                    \
     return result;                                                                           \
   }}

const Packing kPackings[] = {
    PACKING(, int, NATIVE),
    PACKING(_external, MPI_Aint, EXTERNAL),
#if HAS_LARGE
    PACKING(_c, MPI_Count, NATIVE),
    PACKING(_external_c, MPI_Count, EXTERNAL),
#endif
};

/// Intel MPI 2021.18 ends with "Unhandled conversion of unequal size" on AMD processors.
bool has_sound_external() {
#ifdef __x86_64__
  return !is_intel() || __builtin_cpu_is("intel");
#else
  return true;
#endif
}
bool is_sound(const Packing& packing) {
  return has_sound_external() || std::strstr(packing.name, "external") == nullptr;
}

/// Elements go to the next rank in packed form, between bytes that are not theirs, and one of them
/// in a form of its own. As always, what comes of it on the device is what comes of it on the host.
void packed(const std::vector<Type>& types) {
  constexpr MPI_Aint kAhead = 20;
  struct Left {
    std::vector<unsigned char> data, form, back;
    std::vector<MPI_Aint> positions;
  };
  const auto made_on = [](const Packing& packing, const Type& type, int count, Kind kind_of_data,
                          Kind kind_of_form) {
    const auto elements = static_cast<std::size_t>(count);
    const auto bytes = static_cast<int>(4 * type.at.size() * (elements + 1) + 3 * kAhead);
    const std::ptrdiff_t shift = -type.first(elements + 1);
    Buffer data(type.bytes(elements + 1), 0xa5, kind_of_data),
        back(type.bytes(elements + 1), 0x5a, kind_of_data),
        form(static_cast<std::size_t>(bytes), 0xc3, kind_of_form);
    for (std::size_t i = 0; i <= elements; ++i)
      for (std::size_t part = 0; part < type.at.size(); ++part)
        data.set(shift + type.place(i, part), value(rank, i * type.at.size() + part, count));
    char* const from = static_cast<char*>(data.ready()) + shift;
    char* const to = static_cast<char*>(back.ready()) + shift;
    void* const between = form.ready();
    std::vector<MPI_Aint> positions;
    MPI_Aint at = kAhead;
    const auto check = [&](int result) {
      CHECK(result == MPI_SUCCESS, "%s: %s", packing.name, error_text(result).c_str());
      positions.push_back(at);
    };
    check(packing.pack(from, count, type.handle, between, bytes, at));
    check(packing.pack(from + count * type.extent, 1, type.handle, between, bytes, at));
    MPI_Sendrecv_replace(between, static_cast<int>(at), MPI_PACKED, next, 21, previous, 21,
                         MPI_COMM_WORLD, MPI_STATUS_IGNORE);
    at = kAhead;
    check(packing.unpack(between, bytes, at, to, count, type.handle));
    check(packing.unpack(between, bytes, at, to + count * type.extent, 1, type.handle));
    return Left{data.now(), form.now(), back.now(), std::move(positions)};
  };
  for (const Packing& packing : kPackings)
    for (const Type& type : types)
      for (const int count : {0, 1, 3000}) {
        if (!is_sound(packing)) continue;
        const Left expected = made_on(packing, type, count, Kind::host, Kind::host);
        for (const auto& [of_data, of_form] :
             {std::pair(Kind::device, Kind::device), std::pair(Kind::device, Kind::host),
              std::pair(Kind::host, Kind::device), std::pair(Kind::device, Kind::pinned)}) {
          const Left found = made_on(packing, type, count, kind(of_data), kind(of_form));
          const std::string what =
              std::string(packing.name) + ", " + std::to_string(count) + " of " + type.name;
          expect_bytes(what.c_str(), "data", found.data, expected.data);
          expect_bytes(what.c_str(), "packed form", found.form, expected.form);
          expect_bytes(what.c_str(), "unpacked", found.back, expected.back);
          CHECK(found.positions == expected.positions, "%s: positions", what.c_str());
          calls += 4;
        }
      }
}

/// In the external form Open MPI's MPI_LONG takes less than it says: what is packed next lies
/// behind that.
void packed_longs() {
  constexpr int kCount = 5, kRoom = 200;
  std::vector<unsigned char> expected;
  for (const Kind kind_of_form : {Kind::host, kind(Kind::device)}) {
    Buffer form(kRoom, 0x5a, kind_of_form);
    void* const to = form.ready();
    MPI_Aint at = 20;
    for (int part = 0; part < 2; ++part) {
      long numbers[kCount];
      for (int i = 0; i < kCount; ++i) numbers[i] = 1 + part * kCount + i;
      MPI_Pack_external("external32", numbers, kCount, MPI_LONG, to, kRoom, &at);
    }
    if (kind_of_form == Kind::host && expected.empty())
      expected = form.now();
    else
      expect_bytes("MPI_Pack_external of MPI_LONG", "packed form", form.now(), expected);
    calls += 2;
  }
}

/// What MPIs refuse to pack or unpack, or do in part.
void packed_wrongly() {
  for (const MPI_Comm each : {MPI_COMM_WORLD, MPI_COMM_SELF})
    MPI_Comm_set_errhandler(each, MPI_ERRORS_RETURN);
  struct Wrong {
    const char* what;
    int count, bytes;
    MPI_Datatype type;
  };
  for (const Packing& packing : kPackings)
    for (const Wrong& wrong :
         {Wrong{"no room", 10, 36, MPI_INT}, Wrong{"no type", 10, 80, MPI_DATATYPE_NULL},
          Wrong{"negative count", -1, 80, MPI_INT}})
      for (const bool is_packed : {true, false}) {
        if (!is_sound(packing)) continue;
        const auto made_on = [&](Kind its_kind) {
          Buffer in(80, 0xa5, its_kind), out(80, 0x5a, its_kind);
          MPI_Aint at = 0;
          void *const from = in.ready(), *const to = out.ready();
          const int result =
              is_packed ? packing.pack(from, wrong.count, wrong.type, to, wrong.bytes, at)
                        : packing.unpack(from, wrong.bytes, at, to, wrong.count, wrong.type);
          return std::pair(error_class(result), out.now());
        };
        const auto expected = made_on(Kind::host);
        // MPICH does not look where the external form ends.
        if (expected.first == MPI_SUCCESS && std::strstr(packing.name, "external")) continue;
        const auto found = made_on(kind(Kind::device));
        CHECK(found.first == expected.first, "%s, %s: error class %d, not %d", packing.name,
              wrong.what, found.first, expected.first);
        expect_bytes(packing.name, wrong.what, found.second, expected.second);
        ++calls;
      }
  for (const MPI_Comm each : {MPI_COMM_WORLD, MPI_COMM_SELF})
    MPI_Comm_set_errhandler(each, MPI_ERRORS_ARE_FATAL);
}

void threads() {
  constexpr int kThreads = 4, kRounds = 100, kInts = 2000;
  struct Lane {
    MPI_Comm comm;
    Buffer out{4 * kInts, 0xa5, kind(Kind::device)}, in{4 * kInts, 0x5a, kind(Kind::device)};
    void* from;
    void* to;
    std::thread thread;
  };
  std::vector<Lane> lanes(kThreads);
  for (int t = 0; t < kThreads; ++t) {
    Lane& lane = lanes[static_cast<std::size_t>(t)];
    MPI_Comm_dup(MPI_COMM_WORLD, &lane.comm);
    for (int i = 0; i < kInts; ++i)
      lane.out.set(4 * i, value(rank, static_cast<std::size_t>(i), t));
    lane.from = lane.out.ready();
    lane.to = lane.in.ready();
    lane.thread = std::thread([&lane] {
      for (int round = 0; round < kRounds; ++round) {
        MPI_Request requests[2];
        const int count = round + 1 < kRounds ? 1 + round % kInts : kInts;
        MPI_Irecv(lane.to, count, MPI_INT, previous, round, lane.comm, &requests[0]);
        MPI_Isend(lane.from, count, MPI_INT, next, round, lane.comm, &requests[1]);
        MPI_Waitall(2, requests, MPI_STATUSES_IGNORE);
      }
    });
  }
  for (Lane& lane : lanes) lane.thread.join();
  for (int t = 0; t < kThreads; ++t) {
    Lane& lane = lanes[static_cast<std::size_t>(t)];
    std::vector<unsigned char> expected = lane.in.before;
    for (int i = 0; i < kInts; ++i) {
      const int number = value(previous, static_cast<std::size_t>(i), t);
      std::memcpy(&expected[Buffer::kGuard + 4 * static_cast<std::size_t>(i)], &number, 4);
    }
    expect_bytes("message of a thread", "received", lane.in.now(), expected);
    MPI_Comm_free(&lane.comm);
    calls += kRounds;
  }
}

}  // namespace

int main(int argc, char** argv) {
  int provided = 0;
  MPI_Init_thread(&argc, &argv, MPI_THREAD_MULTIPLE, &provided);
  is_all_on_host = argc > 1 && std::string(argv[1]) == "host";
  if (!is_all_on_host) skip_without_gpu();
  rank = world_rank();
  size = world_size();
  next = (rank + 1) % size;
  previous = (rank + size - 1) % size;
  std::vector<char> attached((1u << 20) + MPI_BSEND_OVERHEAD);
  MPI_Buffer_attach(attached.data(), static_cast<int>(attached.size()));
  const std::vector<Type> types = make_types();
  if (size > 1) all_sends(types);
  all_receives(types);
  columns();
  borders();
#if HAS_ISENDRECV
  exchanged(types);
#endif
  short_messages(types);
  bottom();
  packed(types);
  if (has_sound_external()) packed_longs();
  thousands();
  freed_and_cancelled();
  if (size > 1) errors();  // Open MPI 5.0.11 does not see that of a message to itself
  if (provided == MPI_THREAD_MULTIPLE) threads();
  packed_wrongly();  // at last: in MPICH, a handler of MPI_COMM_SELF is not taken back
  for (std::size_t i = 1; i < types.size(); ++i) {
    MPI_Datatype handle = types[i].handle;
    MPI_Type_free(&handle);
  }
  void* buffer;
  int bytes;
  MPI_Buffer_detach(&buffer, &bytes);
  if (rank == 0) std::printf("%ld calls checked\n", calls);
  MPI_Finalize();
}
