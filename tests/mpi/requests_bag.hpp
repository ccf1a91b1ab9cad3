// SPDX-License-Identifier: BSD-3-Clause
// For requests.cpp: requests of any origin in one array, which is completed by any of the functions
// that MPI has for it. What the standard says of flags, indices, handles and statuses is checked
// here; what a request has done is checked by the function that it was added with.
#pragma once

#include <functional>
#include <memory>
#include <numeric>
#include <string_view>
#include <thread>
#include <utility>
#include <vector>

#include "requests_reduction.hpp"

enum class How {
  in_order,
  reverse,
  test_each,
  waitall,
  testall,
  waitany,
  waitsome,
  testany,
  testsome
};
constexpr int kHows = 9;

constexpr int kErrorCanary = -77;
inline MPI_Status fresh_status() {
  MPI_Status status;
  std::memset(static_cast<void*>(&status), 0x3c, sizeof status);
  status.MPI_ERROR = kErrorCanary;
  return status;
}

/// MPI-4.1, 3.7.5: only functions that return MPI_ERR_IN_STATUS need to set it.
inline void check_error_field(const MPI_Status& status) {
  EXPECT(status.MPI_ERROR == MPI_SUCCESS || status.MPI_ERROR == kErrorCanary, "%d",
         status.MPI_ERROR);
}

/// MPI-4.1, 3.7.3: what null and inactive requests give.
inline void check_empty(const MPI_Status& status) {
  int count = -1, is_cancelled = -1;
  MPI_Get_count(&status, MPI_BYTE, &count);
  MPI_Test_cancelled(&status, &is_cancelled);
  EXPECT(status.MPI_SOURCE == MPI_ANY_SOURCE && status.MPI_TAG == MPI_ANY_TAG && count == 0 &&
             is_cancelled == 0,
         "empty status: source %d, tag %d, count %d, cancelled %d", status.MPI_SOURCE,
         status.MPI_TAG, count, is_cancelled);
  check_error_field(status);
}

/// Persistent reductions are not the MPI's, but for those on communicators of one rank, say.
inline bool are_collectives_ours() {
  return is_served_here() && size > 1 && std::string_view(section) != "communicators";
}

class Bag {
 public:
  using Done = std::function<void(const MPI_Status*)>;  ///< null where statuses are ignored

  void add(MPI_Request request, bool is_active, bool is_persistent, Done done) {
    requests_.push_back(request);
    items_.push_back({request, is_active, is_persistent, std::move(done)});
  }
  /// Adds an inactive persistent collective.
  void add_persistent(MPI_Request request, Done done) {
    int flag = 0;
    MPI_Testall(1, &request, &flag, MPI_STATUSES_IGNORE);
    if (!flag) {
      // MPICH 5.0.2 and Intel MPI 2021.18: MPI_Testall and MPI_Waitall never return an inactive
      // persistent collective (the latter hangs), and MPI_Testall of an active one fails when it is
      // complete ("See the MPI_ERROR field", which says Success).
      EXPECT(is_mpich() && !are_collectives_ours(), "MPI_Testall: flag 0 for an inactive request");
      has_faulty_ = true;
    }
    add(request, false, true, std::move(done));
  }
  void add_null() { add(MPI_REQUEST_NULL, false, false, {}); }

  /// Puts them in an order of this rank's own.
  void shuffle(std::uint64_t seed) {
    for (std::size_t i = items_.size(); i > 1; --i) {
      const std::size_t j = scramble(seed + i) % i;
      std::swap(items_[i - 1], items_[j]);
      std::swap(requests_[i - 1], requests_[j]);
    }
  }

  /// MPI_Startall of all persistent ones.
  void start_all() {
    std::vector<MPI_Request> started;
    for (Item& item : items_)
      if (item.is_persistent) {
        started.push_back(item.handle);
        item.is_active = true;
      }
    std::vector<MPI_Request> before = started;
    MPI_Startall(static_cast<int>(started.size()), started.data());
    EXPECT(started == before, "MPI_Startall gave new handles");
  }

  void complete(How how, bool with_statuses) {
    make_room();
    with_statuses_ = with_statuses;
    left_ = 0;
    for (const Item& item : items_) left_ += item.is_active ? 1 : 0;
    if (has_faulty_ && how == How::testall) how = How::test_each;
    switch (how) {
      case How::in_order:
        for (std::size_t i = 0; i < items_.size(); ++i) wait(i);
        break;
      case How::reverse:
        for (std::size_t i = items_.size(); i-- > 0;) wait(i);
        break;
      case How::test_each:
        while (left_ > 0) {
          for (std::size_t i = 0; i < items_.size(); ++i) test(i);
          std::this_thread::yield();
        }
        break;
      case How::waitall:
        MPI_Waitall(count(), requests_.data(), all_statuses());
        all_done();
        break;
      case How::testall:
        testall();
        break;
      case How::waitany:
        while (left_ > 0) any(false);
        break;
      case How::waitsome:
        while (left_ > 0) some(false);
        break;
      case How::testany:
        while (left_ > 0)
          if (!any(true)) std::this_thread::yield();
        break;
      case How::testsome:
        while (left_ > 0)
          if (!some(true)) std::this_thread::yield();
        break;
    }
    EXPECT(left_ == 0, "%d requests were not reported", left_);
    check_exhausted();
  }

  /// Nothing is active any more: every function says so at once.
  void check_exhausted() {
    make_room();
    const std::vector<MPI_Request> before = requests_;
    int index = -5, outcount = -5, flag = -5;
    MPI_Status status = fresh_status();
    MPI_Waitany(count(), requests_.data(), &index, &status);
    EXPECT(index == MPI_UNDEFINED, "MPI_Waitany: index %d", index);
    check_empty(status);
    index = -5;
    status = fresh_status();
    MPI_Testany(count(), requests_.data(), &index, &flag, &status);
    EXPECT(flag != 0 && index == MPI_UNDEFINED, "MPI_Testany: flag %d, index %d", flag, index);
    // MPICH 4.0.2 leaves the status as it was.
    if (!is_mpich() || !library_is("4.0.2")) check_empty(status);
    MPI_Waitsome(count(), requests_.data(), &outcount, indices_.data(), statuses_.data());
    EXPECT(outcount == MPI_UNDEFINED, "MPI_Waitsome: outcount %d", outcount);
    outcount = -5;
    MPI_Testsome(count(), requests_.data(), &outcount, indices_.data(), statuses_.data());
    EXPECT(outcount == MPI_UNDEFINED, "MPI_Testsome: outcount %d", outcount);
    for (const bool is_test : {false, true}) {
      if (has_faulty_) break;
      make_room();
      flag = 1;
      if (is_test)
        MPI_Testall(count(), requests_.data(), &flag, statuses_.data());
      else
        MPI_Waitall(count(), requests_.data(), statuses_.data());
      EXPECT(flag == 1, "MPI_Testall: flag %d", flag);
      for (std::size_t i = 0; i < requests_.size(); ++i) check_empty(statuses_[i]);
    }
    for (MPI_Request& request : requests_) {
      status = fresh_status();
      flag = 0;
      MPI_Test(&request, &flag, &status);
      EXPECT(flag != 0, "MPI_Test of an inactive request");
      check_empty(status);
      status = fresh_status();
      flag = 0;
      MPI_Request_get_status(request, &flag, &status);
      EXPECT(flag != 0, "MPI_Request_get_status of an inactive request");
      check_empty(status);
      status = fresh_status();
      MPI_Wait(&request, &status);
      check_empty(status);
    }
    EXPECT(before == requests_, "handles changed");
  }

  void free_all() {
    for (MPI_Request& request : requests_)
      if (request != MPI_REQUEST_NULL) {
        MPI_Request_free(&request);
        EXPECT(request == MPI_REQUEST_NULL, "MPI_Request_free");
      }
    requests_.clear();
    items_.clear();
    has_faulty_ = false;
  }

 private:
  struct Item {
    MPI_Request handle;
    bool is_active, is_persistent;
    Done done;
  };

  void make_room() {
    statuses_.assign(std::max<std::size_t>(requests_.size(), 1), fresh_status());
    indices_.assign(std::max<std::size_t>(requests_.size(), 1), -5);
  }
  int count() const { return static_cast<int>(requests_.size()); }
  MPI_Status* all_statuses() { return with_statuses_ ? statuses_.data() : MPI_STATUSES_IGNORE; }
  MPI_Status* one_status() {
    statuses_[0] = fresh_status();
    return with_statuses_ ? statuses_.data() : MPI_STATUS_IGNORE;
  }

  /// The MPI says that request i is complete.
  void done(std::size_t i, const MPI_Status& status) {
    EXPECT(i < items_.size(), "index %zu", i);
    Item& item = items_[i];
    EXPECT(item.is_active, "request %zu of %zu was reported, and is not active", i, items_.size());
    EXPECT(requests_[i] == (item.is_persistent ? item.handle : MPI_REQUEST_NULL),
           "handle of request %zu, which is %s", i, item.is_persistent ? "persistent" : "not");
    item.is_active = false;
    --left_;
    if (with_statuses_) check_error_field(status);
    item.done(with_statuses_ ? &status : nullptr);
  }
  void all_done() {
    for (std::size_t i = 0; i < items_.size(); ++i) {
      if (items_[i].is_active)
        done(i, statuses_[i]);
      else if (with_statuses_)
        check_empty(statuses_[i]);
    }
  }
  void expect_unchanged(std::size_t i) {
    EXPECT(requests_[i] == (items_[i].is_active || items_[i].is_persistent ? items_[i].handle
                                                                           : MPI_REQUEST_NULL),
           "handle of request %zu of %zu", i, items_.size());
  }

  void wait(std::size_t i) {
    MPI_Wait(&requests_[i], one_status());
    if (items_[i].is_active)
      done(i, statuses_[0]);
    else if (with_statuses_)
      check_empty(statuses_[0]);
  }
  void test(std::size_t i) {
    int flag = -5;
    MPI_Test(&requests_[i], &flag, one_status());
    EXPECT(flag == 0 || flag == 1, "flag %d", flag);
    if (!items_[i].is_active) {
      EXPECT(flag == 1, "request %zu is inactive", i);
      if (with_statuses_) check_empty(statuses_[0]);
    } else if (flag) {
      done(i, statuses_[0]);
    } else {
      expect_unchanged(i);
    }
  }
  void testall() {
    for (int flag = -5;; std::this_thread::yield()) {
      MPI_Testall(count(), requests_.data(), &flag, all_statuses());
      EXPECT(flag == 0 || flag == 1, "flag %d", flag);
      if (flag) break;
      for (std::size_t i = 0; i < items_.size(); ++i) expect_unchanged(i);
    }
    all_done();
  }
  bool any(bool is_test) {
    int index = -5, flag = 1;
    if (is_test)
      MPI_Testany(count(), requests_.data(), &index, &flag, one_status());
    else
      MPI_Waitany(count(), requests_.data(), &index, one_status());
    EXPECT(flag == 0 || flag == 1, "flag %d", flag);
    if (flag) {
      EXPECT(index >= 0 && index < count(), "index %d of %d", index, count());
      done(static_cast<std::size_t>(index), statuses_[0]);
    } else {
      EXPECT(index == MPI_UNDEFINED, "index %d", index);
    }
    return flag != 0;
  }
  bool some(bool is_test) {
    int outcount = -5;
    statuses_.assign(statuses_.size(), fresh_status());
    if (is_test)
      MPI_Testsome(count(), requests_.data(), &outcount, indices_.data(), all_statuses());
    else
      MPI_Waitsome(count(), requests_.data(), &outcount, indices_.data(), all_statuses());
    EXPECT(outcount >= (is_test ? 0 : 1) && outcount <= left_, "outcount %d of %d", outcount,
           left_);
    for (int k = 0; k < outcount; ++k)
      done(static_cast<std::size_t>(indices_[static_cast<std::size_t>(k)]),
           statuses_[static_cast<std::size_t>(k)]);
    return outcount > 0;
  }

  std::vector<MPI_Request> requests_;
  std::vector<Item> items_;
  std::vector<MPI_Status> statuses_;
  std::vector<int> indices_;
  bool with_statuses_ = true;
  bool has_faulty_ = false;  ///< among them are some that MPI_Testall and MPI_Waitall cannot
  int left_ = 0;             ///< active requests
};

/// Completes a request in a way of its own for every `how`, with or without a status.
inline void finish(MPI_Request* request, int how) {
  int flag = 0, index = -5, outcount = -5;
  MPI_Status status = fresh_status();
  MPI_Status* const at = how / 8 % 2 ? MPI_STATUS_IGNORE : &status;
  MPI_Status* const array = how / 8 % 2 ? MPI_STATUSES_IGNORE : &status;
  switch (how % 8) {
    case 0:
      MPI_Wait(request, at);
      break;
    case 1:
      for (; !flag; std::this_thread::yield()) MPI_Test(request, &flag, at);
      break;
    case 2:
      MPI_Waitall(1, request, array);
      break;
    case 3:
      MPI_Waitany(1, request, &index, at);
      EXPECT(index == 0, "%d", index);
      break;
    case 4:
      MPI_Waitsome(1, request, &outcount, &index, array);
      EXPECT(outcount == 1 && index == 0, "%d %d", outcount, index);
      break;
    case 5:
      for (; !flag; std::this_thread::yield()) MPI_Testall(1, request, &flag, array);
      break;
    case 6:
      for (; !flag; std::this_thread::yield()) MPI_Testany(1, request, &index, &flag, at);
      EXPECT(index == 0, "%d", index);
      break;
    default:
      for (; outcount <= 0; std::this_thread::yield()) {
        MPI_Testsome(1, request, &outcount, &index, array);
        EXPECT(outcount == 0 || outcount == 1, "%d", outcount);
      }
      EXPECT(index == 0, "%d", index);
  }
  check_error_field(status);
}

/// The same for a persistent collective that has been started.
inline void finish_started(MPI_Request* request, int how) {
  finish(request, how % 8 == 5 && is_mpich() && !are_collectives_ours()
                      ? how + 1
                      : how);  // see Bag::add_persistent
}
