// A bundle of tfexport on the disk: what it is, and its files, each compared with its sum.
#pragma once

#include <filesystem>
#include <fstream>
#include <iterator>
#include <string>
#include <utility>

#include <nlohmann/json.hpp>
#include <openssl/sha.h>

#include "vocabulary.hpp"

class Bundle {
 public:
  // A bundle that needs more than this program does is refused.
  explicit Bundle(const std::filesystem::path& folder) : folder_(folder), manifest_(Json::parse(read("manifest.json"))) {
    if (manifest_.at("format_version") != 1) refuse("the bundle has a format that is not 1");
    if (manifest_.at("kind") != "encoder-decoder") refuse("the bundle is encoder-only and generates no text");
    if (!has("tokenizer.json")) refuse("the bundle has no tokenizer; export it from a model directory with one");
    if (has("shortlist.bin")) {
      refuse("the bundle has shortlists, which this program does not apply; export it without --shortlist");
    }
    if (has("generation.json")) {
      refuse("the bundle has defaults in generation.json, which greedy decoding does not follow");
    }
  }

  std::string path(const std::string& name) const { return (folder_ / name).string(); }
  bool has(const std::string& name) const { return manifest_.at("files").contains(name); }
  int64_t spec(const std::string& name) const { return manifest_.at("spec").at(name); }
  int64_t token(const std::string& name) const { return manifest_.at("spec").at("tokens").at(name); }
  Ids around(const std::string& name) const { return manifest_.at("text").at(name); }

  std::string target_tokenizer() const {
    return has("target_tokenizer.json") ? "target_tokenizer.json" : "tokenizer.json";
  }
  Ids ends() const { return {token("pad"), token("start"), token("eos")}; }

  // Where the target has ids of its own, its start and end are ordinary words of the source.
  Ids special_of_sources() const {
    Ids ids = has("target_tokenizer.json") ? Ids{token("pad")} : ends();
    for (const auto* name : {"source_prefix", "source_suffix"}) {
      for (const auto id : around(name)) ids.push_back(id);
    }
    return ids;
  }

  // The files of encoder and decoder, in the first variant that ONNX Runtime runs on the CPU.
  std::pair<std::string, std::string> graphs() const {
    if (has("decoder_contrib.onnx")) return {"encoder_contrib.onnx", "decoder_contrib.onnx"};
    if (has("decoder.onnx")) return {"encoder.onnx", "decoder.onnx"};
    return {"encoder.onnx", "decoder_static.onnx"};
  }

  // The bytes of a file, compared with its sum.
  std::string checked(const std::string& name) const {
    const auto bytes = read(name);
    unsigned char sum[SHA256_DIGEST_LENGTH];
    SHA256(reinterpret_cast<const unsigned char*>(bytes.data()), bytes.size(), sum);
    std::string hex;
    for (const auto byte : sum) {
      hex += "0123456789abcdef"[byte >> 4];
      hex += "0123456789abcdef"[byte & 15];
    }
    if (!has(name) || manifest_.at("files").at(name).at("sha256") != hex) {
      refuse(name + " is not the file that the manifest names; copy the bundle again");
    }
    return bytes;
  }

 private:
  std::string read(const std::string& name) const {
    std::ifstream file(path(name), std::ios::binary);
    if (!file) refuse(path(name) + " cannot be read");
    return {std::istreambuf_iterator<char>(file), {}};
  }

  std::filesystem::path folder_;
  Json manifest_;
};
