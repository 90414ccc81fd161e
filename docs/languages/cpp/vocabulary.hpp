// A tokenizer.json whose model is a list of tokens (WordLevel), as texts of characters or of words have it.
#pragma once

#include <algorithm>
#include <functional>
#include <memory>
#include <set>
#include <stdexcept>
#include <string>
#include <unordered_map>
#include <vector>

#include <nlohmann/json.hpp>
#include <unicode/normalizer2.h>
#include <unicode/regex.h>
#include <unicode/unistr.h>

using Ids = std::vector<int64_t>;
using Json = nlohmann::json;

[[noreturn]] inline void refuse(const std::string& reason) { throw std::runtime_error(reason); }

// Text never becomes a special token: it is read as its characters, or as unknown.
class Vocabulary {
 public:
  // `special` are ids that no text becomes or shows, besides those that the file marks.
  Vocabulary(const Json& data, const Ids& special) : special_(special.begin(), special.end()) {
    const auto& model = data.at("model");
    if (model.value("type", "") != "WordLevel") refuse_part("model", model);
    if (!data.at("post_processor").is_null()) refuse_part("post_processor", data.at("post_processor"));
    for (const auto& [token, id] : model.at("vocab").items()) {
      ids_[token] = id;
      tokens_[id] = token;
    }
    unknown_ = ids_.at(model.at("unk_token").get<std::string>());
    for (const auto& token : data.at("added_tokens")) {
      if (!token.at("special")) refuse_part("added token", token);
      special_.insert(token.at("id").get<int64_t>());
    }
    add_normalizer(data.at("normalizer"));
    const auto& splitter = data.at("pre_tokenizer");
    if (splitter.is_null()) {
      splitter_.reset();
    } else if (splitter.at("type") == "WhitespaceSplit") {
      splitter_ = regex("\\P{White_Space}+");
      keeps_between_ = false;
    } else if (splitter.at("type") == "Split" && splitter.at("behavior") == "Isolated" && !splitter.at("invert")) {
      splitter_ = regex(splitter.at("pattern").at("Regex"));
    } else {
      refuse_part("pre_tokenizer", splitter);
    }
    const auto& decoder = data.at("decoder");
    if (!decoder.is_null() && decoder.at("type") != "Fuse") refuse_part("decoder", decoder);
    between_ = decoder.is_null() ? " " : "";
  }

  Ids encode(const std::string& text) const {
    auto said = icu::UnicodeString::fromUTF8(text);
    std::string again;
    if (said.toUTF8String(again) != text) refuse("a text is not valid UTF-8");
    if (icu::UnicodeString(said).trim().isEmpty()) refuse("a text is empty; leave it out");
    for (const auto& step : normalizer_) said = step(said);
    Ids ids;
    for (const auto& piece : split(said)) {
      std::string token;
      const auto found = ids_.find(piece.toUTF8String(token));
      ids.push_back(found == ids_.end() || special_.count(found->second) ? unknown_ : found->second);
    }
    if (std::all_of(ids.begin(), ids.end(), [this](auto id) { return id == unknown_; })) {
      refuse("the vocabulary knows no character of: " + text);
    }
    return ids;
  }

  std::string decode(const Ids& ids) const {
    std::string text;
    bool is_first = true;
    for (const auto id : ids) {
      const auto found = tokens_.find(id);
      if (found == tokens_.end() || special_.count(id)) continue;
      text += (is_first ? "" : between_) + found->second;
      is_first = false;
    }
    return text;
  }

 private:
  using Pattern = std::shared_ptr<icu::RegexPattern>;

  [[noreturn]] static void refuse_part(const std::string& name, const Json& part) {
    refuse("the tokenizer's " + name + " is not covered: " + part.dump().substr(0, 100));
  }

  static void check(UErrorCode status) {
    if (U_FAILURE(status)) refuse(std::string("the tokenizer's text processing failed: ") + u_errorName(status));
  }

  static Pattern regex(const std::string& pattern) {
    UErrorCode status = U_ZERO_ERROR;
    UParseError error;
    Pattern compiled(icu::RegexPattern::compile(icu::UnicodeString::fromUTF8(pattern), error, status));
    check(status);
    return compiled;
  }

  void add_normalizer(const Json& part) {
    if (part.is_null()) return;
    const std::string type = part.at("type");
    UErrorCode status = U_ZERO_ERROR;
    if (type == "Sequence") {
      for (const auto& inner : part.at("normalizers")) add_normalizer(inner);
    } else if (type == "NFC" || type == "NFKC") {
      const auto get = type == "NFC" ? icu::Normalizer2::getNFCInstance : icu::Normalizer2::getNFKCInstance;
      const auto* form = get(status);
      check(status);
      normalizer_.push_back([form](const icu::UnicodeString& text) {
        UErrorCode status = U_ZERO_ERROR;
        auto made = form->normalize(text, status);
        check(status);
        return made;
      });
    } else if (type == "Replace" && part.at("pattern").contains("Regex") && part.at("content") == "") {
      normalizer_.push_back([pattern = regex(part.at("pattern").at("Regex"))](const icu::UnicodeString& text) {
        UErrorCode status = U_ZERO_ERROR;
        std::unique_ptr<icu::RegexMatcher> matcher(pattern->matcher(text, status));
        auto made = matcher->replaceAll(icu::UnicodeString(), status);
        check(status);
        return made;
      });
    } else {
      refuse_part("normalizer", part);
    }
  }

  std::vector<icu::UnicodeString> split(const icu::UnicodeString& text) const {
    if (!splitter_) return {text};
    UErrorCode status = U_ZERO_ERROR;
    std::unique_ptr<icu::RegexMatcher> matcher(splitter_->matcher(text, status));
    check(status);
    std::vector<icu::UnicodeString> pieces;
    int32_t end = 0;
    while (matcher->find(status)) {
      const auto begin = matcher->start(status);
      if (keeps_between_ && begin > end) pieces.push_back(text.tempSubStringBetween(end, begin));
      end = matcher->end(status);
      if (end > begin) pieces.push_back(text.tempSubStringBetween(begin, end));
    }
    check(status);
    if (keeps_between_ && end < text.length()) pieces.push_back(text.tempSubStringBetween(end));
    return pieces;
  }

  std::unordered_map<std::string, int64_t> ids_;
  std::unordered_map<int64_t, std::string> tokens_;
  std::set<int64_t> special_;
  int64_t unknown_;
  std::vector<std::function<icu::UnicodeString(const icu::UnicodeString&)>> normalizer_;
  Pattern splitter_;
  bool keeps_between_ = true;
  std::string between_;
};
