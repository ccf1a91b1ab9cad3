// SPDX-License-Identifier: BSD-3-Clause
#include "backend/cuda/exports.hpp"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <mutex>
#include <utility>

#include "base/log.hpp"

namespace trib::cuda {

struct Exports::Shown {
  std::atomic<std::uint64_t> number;  // zero: taken back
  Way way;                            // these two are written before `number`
  CUipcMemHandle handle;
};

/// Of a rank, in shared memory. It alone writes it.
struct Exports::Table {
  alignas(64) std::atomic<std::uint64_t> taken_back;  // counts
  std::atomic<std::uint64_t> written;                 // times that letters were
  Shown shown[kShown];
};

/// What a letter says of the files with it: one of each piece.
struct Exports::Parcel {
  std::uint64_t number;
  std::uint64_t bytes[Mailbox::kMostFiles];
};

struct Exports::All {
  std::mutex mutex;
  std::vector<Exports*> exports;
};
Exports::All& Exports::all() {
  static All& all = *new All;  // never destroyed: communicators may end very late
  return all;
}

/// What hold_all() gives.
struct Exports::Tokens {
  std::shared_ptr<void> in, out;
  std::vector<Piece> pieces;  // that the buffers lie in
};

namespace {

/// A Parcel begins with it.
std::uint64_t number_of(const Mailbox::Letter& letter) {
  std::uint64_t number = 0;
  std::memcpy(&number, letter.text.data(), sizeof number);
  return number;
}

}  // namespace

Exports::Exports(Bootstrap& bootstrap, const ContextId& context, std::vector<int> readers,
                 const Habits& habits)
    : rank_(bootstrap.rank()),
      context_(context),
      driver_(*driver()),
      readers_(std::move(readers)),
      own_(kShown),
      habits_(habits),
      peers_(static_cast<std::size_t>(bootstrap.size())) {
  for (Peer& peer : peers_) peer.mapped.resize(kShown);
}

std::unique_ptr<Exports> Exports::open(Bootstrap& bootstrap, Config::Segment mode,
                                       const ContextId& context, std::vector<int> readers,
                                       const Habits& habits, std::string& why) {
  auto exports =
      std::unique_ptr<Exports>(new Exports(bootstrap, context, std::move(readers), habits));
  exports->segment_ = Segment::open(bootstrap, sizeof(Table), mode, why);
  if (!exports->segment_) return nullptr;
  std::string why_not;
  exports->mailbox_ = Mailbox::open(bootstrap, why_not);
  if (!exports->mailbox_ && exports->rank_ == 0)
    log_once(Config::Log::info, "GPUs do not map memory of cuMemMap of each other: " + why_not);
  const Current current(context);
  check(exports->driver_.cuCtxGetDevice_(&exports->device_), "no device");
  const std::lock_guard lock(all().mutex);
  all().exports.push_back(exports.get());
  return exports;
}

Exports::~Exports() {
  const std::lock_guard lock(all().mutex);
  std::erase(all().exports, this);
  try {
    const Current current(context_);
    for (Peer& peer : peers_)
      for (Mapped& mapped : peer.mapped) close(mapped);
  } catch (const Error&) {
    // The context is gone, and its mappings with it.
  }
}

Exports::Table& Exports::table(int rank) const {
  return *reinterpret_cast<Table*>(segment_->of(rank));
}

// ---------------------------------------------------------------------------- this rank's memory

std::uint64_t Exports::show(const void* pointer, std::size_t bytes, std::uint64_t& at,
                            std::uint64_t beside) {
  const std::lock_guard lock(all().mutex);
  ++shows_;
  const auto address = reinterpret_cast<CUdeviceptr>(pointer);
  Own* const own = find_or_add(address, bytes, beside);
  if (own == nullptr) return 0;
  at = address - own->base();
  own->used = shows_;
  last_shown_[next_shown_++ % last_shown_.size()] = own->number;
  if (own->uses++ >= own->due && !own->is_shown) publish(*own);
  return own->is_shown ? own->number : 0;
}

std::shared_ptr<void> Exports::hold(const void* pointer, std::size_t bytes, std::uint64_t& number,
                                    std::uint64_t& at, std::uint64_t beside,
                                    std::vector<Piece>& pieces) {
  const std::lock_guard lock(all().mutex);
  ++shows_;
  const auto address = reinterpret_cast<CUdeviceptr>(pointer);
  full_until_ = shows_;
  const auto held = std::count_if(own_.begin(), own_.end(),
                                  [](const Own& other) { return !other.held.expired(); });
  if (held >= kMostHeld) {  // no place is to be taken in vain
    const Own* const known = find(address, address + 1);
    if (known == nullptr || known->held.expired()) return nullptr;
  }
  Own* const own = find_or_add(address, bytes, beside);
  if (own == nullptr) return nullptr;
  own->used = shows_;
  if (!own->is_shown) publish(*own);
  if (!own->is_shown) return nullptr;
  std::shared_ptr<void> token = own->held.lock();
  if (!token) {
    if (held >= kMostHeld) return nullptr;
    token = std::make_shared<char>();
    own->held = token;
  }
  number = own->number;
  at = address - own->base();
  const CUdeviceptr end = address + std::max(bytes, std::size_t{1});
  for (const Piece& piece : own->pieces) {
    const bool is_known = std::any_of(pieces.begin(), pieces.end(),
                                      [&](const Piece& other) { return other.id == piece.id; });
    if (!is_known && address < piece.base + piece.bytes && piece.base < end)
      pieces.push_back(piece);
  }
  return token;
}

bool Exports::is_still_there(const std::shared_ptr<void>& held) const {
  const auto* const tokens = static_cast<const Tokens*>(held.get());
  return std::all_of(tokens->pieces.begin(), tokens->pieces.end(),
                     [this](const Piece& piece) { return is_there(piece); });
}

std::shared_ptr<void> Exports::hold_all(Bootstrap& bootstrap, const ShownBuffers& buffers,
                                        const Reach& reach) {
  look_for_letters();
  auto tokens = std::make_shared<Tokens>();
  std::vector<Piece>& pieces = tokens->pieces;
  Card mine;
  if (buffers.in != nullptr)
    tokens->in = hold(buffers.in, buffers.in_bytes, mine.in_block, mine.in_at, 0, pieces);
  mine.is_reached = tokens->in != nullptr;
  if (buffers.out != nullptr) {
    tokens->out =
        hold(buffers.out, buffers.out_bytes, mine.out_block, mine.out_at, mine.in_block, pieces);
    mine.is_reached = mine.is_reached && tokens->out;
  }
  return reach_all(bootstrap, mine, reach) ? tokens : nullptr;
}

std::shared_ptr<void> Exports::hold_none(Bootstrap& bootstrap, const Reach& reach) {
  look_for_letters();
  Card mine;
  return reach_all(bootstrap, mine, reach) ? std::make_shared<char>() : nullptr;
}

bool Exports::reach_all(Bootstrap& bootstrap, Card& mine, const Reach& reach) {
  const auto is_everywhere = [&](std::vector<Card>& all) {
    all.resize(peers_.size());
    bootstrap.exchange(&mine, all.data(), sizeof mine);
    return std::all_of(all.begin(), all.end(), [](const Card& card) { return card.is_reached; });
  };
  std::vector<Card> all, answers;
  const bool are_all_shown = is_everywhere(all);
  look_for_letters();  // also where they are not: the next ones want room
  if (!are_all_shown) return false;
  for (int rank = 0; rank < static_cast<int>(all.size()); ++rank)
    if (rank != rank_ && !reach(rank, all[static_cast<std::size_t>(rank)])) mine.is_reached = false;
  return is_everywhere(answers);
}

/// What holds the buffer. Null: no peer can map it, or there is no place.
Exports::Own* Exports::find_or_add(CUdeviceptr address, std::size_t bytes, std::uint64_t beside) {
  Way way = Way::none;
  const Piece first = piece_at(address, way);
  if (way == Way::none) return nullptr;
  // An allocation holds all of a buffer that begins in it, or the program is wrong.
  const CUdeviceptr end = way == Way::handle ? address + 1 : address + std::max(bytes, 1ul);
  if (Own* const own = find(address, end, beside)) return own;
  std::vector<Piece> pieces{first};
  while (pieces.back().base + pieces.back().bytes < end) {
    Way next = Way::none;
    pieces.push_back(piece_at(pieces.back().base + pieces.back().bytes, next));
    if (next != way || pieces.size() > Mailbox::kMostFiles) return nullptr;
  }
  return add(way, std::move(pieces));
}

/// The memory around an address, and how peers can get at it.
Exports::Piece Exports::piece_at(CUdeviceptr address, Way& way) const {
  Piece piece;
  unsigned is_managed = 0, has_handle = 0;
  std::uint64_t types = 0;
  CUmemoryPool pool = nullptr;
  CUpointer_attribute wanted[] = {
      CU_POINTER_ATTRIBUTE_BUFFER_ID,           CU_POINTER_ATTRIBUTE_RANGE_START_ADDR,
      CU_POINTER_ATTRIBUTE_RANGE_SIZE,          CU_POINTER_ATTRIBUTE_IS_MANAGED,
      CU_POINTER_ATTRIBUTE_MEMPOOL_HANDLE,      CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE,
      CU_POINTER_ATTRIBUTE_ALLOWED_HANDLE_TYPES};
  void* values[] = {&piece.id, &piece.base, &piece.bytes, &is_managed, &pool, &has_handle, &types};
  way = Way::none;
  if (driver_.cuPointerGetAttributes_(std::size(wanted), wanted, values, address) != CUDA_SUCCESS ||
      piece.id == 0 || piece.base == 0 || is_managed != 0)
    return piece;
  if (has_handle != 0) {
    way = Way::handle;
    return piece;
  }
  // The range of such memory is the address space that the program has reserved for it and more.
  if (mailbox_ && pool == nullptr && (types & CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR) != 0 &&
      driver_.cuMemGetAddressRange_(&piece.base, &piece.bytes, address) == CUDA_SUCCESS)
    way = Way::file;
  return piece;
}

bool Exports::is_there(const Piece& piece) const {
  unsigned long long id = 0;
  CUpointer_attribute wanted[] = {CU_POINTER_ATTRIBUTE_BUFFER_ID};
  void* values[] = {&id};
  return driver_.cuPointerGetAttributes_(1, wanted, values, piece.base) == CUDA_SUCCESS &&
         id == piece.id;
}

/// All from `address` to `end`, which is still there: other parts of it may be gone, where the
/// program maps them.
bool Exports::holds(const Own& own, CUdeviceptr address, CUdeviceptr end) const {
  return own.number != 0 && own.base() <= address && end <= own.end() &&
         std::all_of(own.pieces.begin(), own.pieces.end(), [&](const Piece& piece) {
           return end <= piece.base || piece.base + piece.bytes <= address || is_there(piece);
         });
}

/// What holds all of that; if it can be, the one of number `beside`.
Exports::Own* Exports::find(CUdeviceptr address, CUdeviceptr end, std::uint64_t beside) {
  Own& other = own_[beside % kShown];
  if (beside != 0 && other.number == beside && holds(other, address, end)) return &other;
  const auto own = std::find_if(own_.begin(), own_.end(),
                                [&](const Own& it) { return holds(it, address, end); });
  return own == own_.end() ? nullptr : &*own;
}

/// Kernels may be using it while other threads hold buffers for later.
bool Exports::was_shown_last(const Own& own) const {
  return own.number != 0 &&
         std::find(last_shown_.begin(), last_shown_.end(), own.number) != last_shown_.end();
}

/// In a free place, or that of the one that was not used for the longest time. Null: that was too
/// recently.
Exports::Own* Exports::add(Way way, std::vector<Piece> pieces) {
  constexpr std::uint64_t kPause = 32;  // all are looked at, which takes microseconds
  if (shows_ < full_until_) return nullptr;
  // It may lie where another one was, which its peers have to let go first.
  for (Exports* const exports : all().exports) exports->look_for_freed(kShown);
  const auto is_in_use = [&](const Own& own) { return !own.held.expired() || was_shown_last(own); };
  const auto last_use = [&](const Own& own) {  // of a free place: zero
    return is_in_use(own) ? UINT64_MAX : own.used;
  };
  const auto place = std::min_element(own_.begin(), own_.end(), [&](const Own& a, const Own& b) {
    return last_use(a) < last_use(b);
  });
  if (place->number != 0 && (is_in_use(*place) || shows_ - place->used <= habits_.patience)) {
    full_until_ = shows_ + kPause;
    return nullptr;
  }
  take_back(*place);
  // The next number of this place.
  const auto index = static_cast<std::uint64_t>(place - own_.begin());
  last_number_ += 1 + (index + kShown - (last_number_ + 1) % kShown) % kShown;
  place->number = last_number_;
  place->way = way;
  place->pieces = std::move(pieces);
  place->due = habits_.trials;
  return &*place;
}

void Exports::publish(Own& own) {
  Shown& shown = table(rank_).shown[own.number % kShown];
  shown.way = own.way;
  own.is_shown = own.way == Way::file || write_handle(own, shown);
  if (own.is_shown) {
    // Release: pairs with the acquire in map(). The card that names the number comes later still,
    // the letters do, too: a peer throws away those whose number is not here.
    shown.number.store(own.number, std::memory_order_release);
    if (own.way == Way::file && send_files(own) != Mailbox::Sent::yes) {
      shown.number.store(0, std::memory_order_relaxed);
      own.is_shown = false;
    }
  }
  if (!own.is_shown) own.due = 2 * own.uses + 1;  // to try costs as much as many calls
}

bool Exports::write_handle(const Own& own, Shown& shown) {
  CUipcMemHandle handle;
  if (driver_.cuIpcGetMemHandle_(&handle, own.base()) != CUDA_SUCCESS) return false;
  shown.handle = handle;
  return true;
}

/// To all who are to map it; to some maybe again.
Mailbox::Sent Exports::send_files(const Own& own) {
  Parcel parcel{};
  parcel.number = own.number;
  std::vector<File> files;
  std::vector<int> numbers;
  for (const Piece& piece : own.pieces) {
    CUmemGenericAllocationHandle memory = 0;
    if (driver_.cuMemRetainAllocationHandle_(&memory, reinterpret_cast<void*>(piece.base)) !=
        CUDA_SUCCESS)
      return Mailbox::Sent::never;
    int fd = -1;
    const CUresult result = driver_.cuMemExportToShareableHandle_(
        &fd, memory, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, 0);
    driver_.cuMemRelease_(memory);
    if (result != CUDA_SUCCESS) return Mailbox::Sent::never;
    parcel.bytes[files.size()] = piece.bytes;
    files.emplace_back(fd);
    numbers.push_back(fd);
  }
  // Release: pairs with the acquire in look_for_letters(), though the box itself says what is in
  // it.
  table(rank_).written.fetch_add(1, std::memory_order_release);
  for (const int reader : readers_) {
    const Mailbox::Sent sent =
        mailbox_->send(reader, std::as_bytes(std::span(&parcel, 1)), numbers);
    if (sent != Mailbox::Sent::yes) return sent;
  }
  return Mailbox::Sent::yes;
}

void Exports::take_back(Own& own) {
  if (own.is_shown) {
    Table& mine = table(rank_);
    mine.shown[own.number % kShown].number.store(0, std::memory_order_relaxed);
    // Release: pairs with the acquire in close_taken_back().
    mine.taken_back.fetch_add(1, std::memory_order_release);
  }
  own = {};
}

void Exports::take_back_freed(std::size_t looks) {
  const std::lock_guard lock(all().mutex);
  look_for_freed(looks);
}

void Exports::look_for_freed(std::size_t looks) {
  for (std::size_t i = 0, looked = 0; i < kShown && looked < looks; ++i) {
    next_look_ = (next_look_ + 1) % kShown;
    Own& own = own_[next_look_];
    if (own.number == 0 || !own.held.expired()) continue;
    ++looked;
    const auto there = std::count_if(own.pieces.begin(), own.pieces.end(),
                                     [this](const Piece& piece) { return is_there(piece); });
    // Of what was shown last, the pieces that are still there may be what a kernel works on.
    if (there == 0 ||
        (there < static_cast<std::ptrdiff_t>(own.pieces.size()) && !was_shown_last(own)))
      take_back(own);
  }
}

// ------------------------------------------------------------------------------------ the others'

bool Exports::reach(int rank, const Card& card, MappedBuffers& buffers) {
  const std::lock_guard lock(all().mutex);
  close_taken_back(rank);
  bool is_reached = true;
  const auto find = [&](std::uint64_t block, std::uint64_t at) -> void* {
    if (block == 0) return nullptr;
    const CUdeviceptr base = map(rank, block);
    if (base == 0) is_reached = false;
    return base == 0 ? nullptr : reinterpret_cast<void*>(base + at);
  };
  buffers = {find(card.in_block, card.in_at), find(card.out_block, card.out_at)};
  return is_reached;
}

/// The base of an allocation that `rank` shows, or zero.
CUdeviceptr Exports::map(int rank, std::uint64_t number) {
  Peer& peer = peers_[static_cast<std::size_t>(rank)];
  Mapped& mapped = peer.mapped[number % kShown];
  if (mapped.number == number) return mapped.base;
  close(mapped);
  const Shown& shown = table(rank).shown[number % kShown];
  if (shown.number.load(std::memory_order_acquire) != number) return 0;
  mapped.number = number;
  if (shown.way == Way::handle) return mapped.base = open_handle(shown.handle);
  receive_letters();
  std::erase_if(peer.letters, [&](const Mailbox::Letter& letter) {
    if (number_of(letter) != number) return false;
    if (mapped.base == 0) map_files(letter, mapped);
    return true;
  });
  return mapped.base;
}

/// Zero: it cannot be mapped.
CUdeviceptr Exports::open_handle(const CUipcMemHandle& handle) {
  constexpr auto kLazily = CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS;
  CUdeviceptr base = 0;
  CUresult result = driver_.cuIpcOpenMemHandle_(&base, handle, kLazily);
  if (result == CUDA_ERROR_ALREADY_MAPPED) {
    // What lay there before: its rank took it back from all tables before it showed this.
    for (Exports* const exports : all().exports) {
      try {
        exports->close_taken_back_of_all();
      } catch (const Error&) {
        // Its context is gone, and its mappings with it.
      }
    }
    result = driver_.cuIpcOpenMemHandle_(&base, handle, kLazily);
  }
  return result == CUDA_SUCCESS ? base : 0;
}

/// Fills in `base` and `bytes` if all goes well.
void Exports::map_files(const Mailbox::Letter& letter, Mapped& mapped) {
  Parcel parcel{};
  std::memcpy(&parcel, letter.text.data(), std::min(sizeof parcel, letter.text.size()));
  std::size_t total = 0, pieces = 0;
  for (; pieces < Mailbox::kMostFiles && parcel.bytes[pieces] > 0; ++pieces)
    total += parcel.bytes[pieces];
  // Fewer have come than were sent: this process may have no more files.
  if (letter.files.size() != pieces) return;
  CUdeviceptr base = 0;
  if (driver_.cuMemAddressReserve_(&base, total, 0, 0, 0) != CUDA_SUCCESS) return;
  std::size_t done = 0;
  for (std::size_t i = 0; i < pieces; ++i) {
    CUmemGenericAllocationHandle memory = 0;
    void* const file = reinterpret_cast<void*>(static_cast<std::intptr_t>(letter.files[i].get()));
    if (driver_.cuMemImportFromShareableHandle_(
            &memory, file, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR) != CUDA_SUCCESS)
      break;
    const CUresult result = driver_.cuMemMap_(base + done, parcel.bytes[i], 0, memory, 0);
    driver_.cuMemRelease_(memory);  // the mapping keeps it
    if (result != CUDA_SUCCESS) break;
    done += parcel.bytes[i];
  }
  CUmemAccessDesc access{};
  access.location.type = CU_MEM_LOCATION_TYPE_DEVICE;
  access.location.id = device_;
  access.flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
  if (done == total && driver_.cuMemSetAccess_(base, total, &access, 1) == CUDA_SUCCESS) {
    mapped.base = base;
    mapped.bytes = total;
    return;
  }
  if (done > 0) driver_.cuMemUnmap_(base, done);
  driver_.cuMemAddressFree_(base, total);
}

void Exports::look_for_letters() {
  if (!mailbox_) return;
  const std::lock_guard lock(all().mutex);
  bool is_any = false;
  for (int rank = 0; rank < static_cast<int>(peers_.size()); ++rank) {
    Peer& peer = peers_[static_cast<std::size_t>(rank)];
    const std::uint64_t now = table(rank).written.load(std::memory_order_acquire);
    is_any = is_any || now != peer.written;
    peer.written = now;
  }
  if (is_any) receive_letters();
}

void Exports::receive_letters() {
  while (auto letter = mailbox_->receive()) {
    if (letter->text.size() != sizeof(Parcel)) continue;
    auto& letters = peers_[static_cast<std::size_t>(letter->from)].letters;
    if (letters.size() == kMostLetters) letters.erase(letters.begin());
    letters.push_back(std::move(*letter));
  }
}

void Exports::close_taken_back() {
  const std::lock_guard lock(all().mutex);
  close_taken_back_of_all();
}

void Exports::close_taken_back_of_all() {
  const Current current(context_);
  for (int rank = 0; rank < static_cast<int>(peers_.size()); ++rank) close_taken_back(rank);
}

void Exports::close_taken_back(int rank) {
  Peer& peer = peers_[static_cast<std::size_t>(rank)];
  const std::uint64_t count = table(rank).taken_back.load(std::memory_order_acquire);
  if (count == peer.taken_back) return;
  peer.taken_back = count;
  const auto is_gone = [&](std::uint64_t number) {
    return table(rank).shown[number % kShown].number.load(std::memory_order_relaxed) != number;
  };
  for (Mapped& mapped : peer.mapped)
    if (mapped.number != 0 && is_gone(mapped.number)) close(mapped);
  std::erase_if(peer.letters,
                [&](const Mailbox::Letter& letter) { return is_gone(number_of(letter)); });
}

void Exports::close(Mapped& mapped) {
  if (mapped.bytes > 0) {
    driver_.cuMemUnmap_(mapped.base, mapped.bytes);
    driver_.cuMemAddressFree_(mapped.base, mapped.bytes);
  } else if (mapped.base != 0) {
    driver_.cuIpcCloseMemHandle_(mapped.base);
  }
  mapped = {};
}

}  // namespace trib::cuda
