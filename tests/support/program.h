// Running a program as a user does: a folder of its own, what it printed, and with which status it ended.
#ifndef TOKROUTE_TESTS_SUPPORT_PROGRAM_H_
#define TOKROUTE_TESTS_SUPPORT_PROGRAM_H_

#include <sys/wait.h>
#include <unistd.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <sstream>
#include <string>

#include "gtest/gtest.h"

namespace tokroute::testing_support {

struct Ran {
  int status = -1;
  std::string out, err;
};

inline std::string Contents(const std::filesystem::path& path) {
  std::ifstream in(path, std::ios::binary);
  std::ostringstream text;
  text << in.rdbuf();
  return text.str();
}

// A folder that goes with the test.
class FolderTest : public testing::Test {
 protected:
  FolderTest() {
    std::string pattern = (std::filesystem::temp_directory_path() / "tokroute_test.XXXXXX").string();
    EXPECT_NE(mkdtemp(pattern.data()), nullptr);
    base_ = pattern;
    folder_ = base_ / "files";
    std::filesystem::create_directory(folder_);
  }
  ~FolderTest() override { std::filesystem::remove_all(base_); }

  // `arguments` as one types them. What the program prints does not land among the test's files.
  Ran RunProgram(const std::string& program, const std::string& arguments) const {
    const std::string out = (base_ / "stdout").string(), err = (base_ / "stderr").string();
    const int status = std::system((program + " " + arguments + " >" + out + " 2>" + err).c_str());
    return {WIFEXITED(status) ? WEXITSTATUS(status) : -1, Contents(out), Contents(err)};
  }
  std::string File(const std::string& name) const { return (folder_ / name).string(); }
  std::string Write(const std::string& name, const std::string& text) const {
    std::ofstream(File(name), std::ios::binary) << text;
    return File(name);
  }
  bool NoFiles() const { return std::filesystem::is_empty(folder_); }

  std::filesystem::path base_, folder_;
};

}  // namespace tokroute::testing_support

#endif  // TOKROUTE_TESTS_SUPPORT_PROGRAM_H_
