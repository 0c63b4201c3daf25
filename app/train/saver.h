// Saves a run's checkpoints while it goes on. Each rank writes what is its own of parameters and optimizer state at its
// places in the files that all of them share, so no rank needs memory for the whole; the files are those of every
// layout.
//
//   begin()    rank 0 makes the files; every rank copies what is its own, and writes the copy in the background
//   poll()     after each step: when all ranks have written, rank 0 makes a checkpoint of it, in the background too
//   finish()   waits for that
//
// Every rank calls all of these, and they throw what writing threw. With --offload nothing is copied, since that would
// take the memory that is to be saved: then begin() is finished when it returns.
#pragma once
#include <future>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "app/train/train.h"
#include "train/checkpoint/directory.h"
#include "train/checkpoint/state.h"

namespace tessera {

// True when there are checkpoints before the last one that are written from a copy.
bool saves_in_background(const TrainOptions& options);

class Saver {
 public:
  // Both must outlive it. Does nothing with --no-save.
  Saver(const Run& run, Trainer& trainer) : run_(run), trainer_(trainer) {}
  ~Saver();
  Saver(const Saver&) = delete;
  Saver& operator=(const Saver&) = delete;

  // Throws Error for numbers that are not finite and for copies that differ between ranks (train/checkpoint/state.h).
  void begin();
  void poll();
  void finish();
  // Without a copy: done when it returns.
  void save();
  // The loss of the whole validation split after the steps done so far: the best of what is saved stays.
  void validated(double loss);

 private:
  // This rank's part of one file.
  struct File {
    SharedFile file;
    std::map<std::string, int64_t> begins;  // first byte of each tensor
    std::vector<HeldPart> parts;
  };
  void open(bool copied);
  void write() const;
  void all_written();
  void made();
  void name_best();

  const Run& run_;
  Trainer& trainer_;
  bool under_way_ = false;     // a rank is writing
  std::vector<File> files_;    // files that are being written
  std::future<void> writing_;  // valid until this rank has written
  // on rank 0:
  std::unique_ptr<NewCheckpoint> new_;
  std::string about_;
  std::future<void> finishing_;
  int64_t saved_ = -1;  // steps of the newest checkpoint
  BestCheckpoint judged_ = {.step = -1};
};

}  // namespace tessera
