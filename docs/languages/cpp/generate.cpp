// Answers texts with a bundle of tfexport: generate BUNDLE [TEXT…]; without TEXT, each line of standard input.

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <exception>
#include <iostream>
#include <string>
#include <vector>

#include "model.hpp"

namespace {

constexpr const char* kUsage = "usage: generate BUNDLE [--json] [--time] [--batch-size 32] [--threads 1] [TEXT…]";

struct Options {
  bool json = false;  // write one object a line: text, token_ids, finish_reason
  bool time = false;  // say on standard error how long decoding took
  int batch_size = 32;
  int threads = 1;  // more are faster where a step reads many megabytes of weights
  std::vector<std::string> words;
};

Options parse(int argc, char** argv) {
  Options options;
  for (int i = 1; i < argc; ++i) {
    const std::string word = argv[i];
    if (word == "--json" || word == "--time") {
      (word == "--json" ? options.json : options.time) = true;
    } else if (word == "--batch-size" || word == "--threads") {
      const int number = i + 1 < argc ? std::atoi(argv[++i]) : 0;
      if (number < 1) refuse(kUsage);
      (word == "--threads" ? options.threads : options.batch_size) = number;
    } else if (word.rfind("--", 0) == 0) {
      refuse(kUsage);
    } else {
      options.words.push_back(word);
    }
  }
  if (options.words.empty()) refuse(kUsage);
  return options;
}

void run(const Options& options) {
  std::vector<std::string> texts(options.words.begin() + 1, options.words.end());
  std::string line;
  while (options.words.size() == 1 && std::getline(std::cin, line)) {
    if (!line.empty() && line.back() == '\r') line.pop_back();
    texts.push_back(line);
  }
  Model model(Bundle(options.words[0]), options.threads);
  const auto start = std::chrono::steady_clock::now();
  const auto answers = model.generate(texts, options.batch_size);
  const std::chrono::duration<double> took = std::chrono::steady_clock::now() - start;
  size_t tokens = 0;
  for (auto [text, token_ids, finish_reason] : answers) {
    tokens += token_ids.size();
    std::replace(text.begin(), text.end(), '\n', options.json ? '\n' : ' ');
    const Json answer{{"text", text}, {"token_ids", token_ids}, {"finish_reason", finish_reason}};
    std::cout << (options.json ? answer.dump() : text) << '\n';
  }
  if (options.time) std::fprintf(stderr, "%zu texts, %zu tokens, %.3f s\n", texts.size(), tokens, took.count());
}

}  // namespace

int main(int argc, char** argv) {
  try {
    run(parse(argc, argv));
  } catch (const std::exception& error) {
    std::cerr << "error: " << error.what() << '\n';
    return 1;
  }
}
