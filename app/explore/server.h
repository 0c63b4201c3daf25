// A web server for one user of this machine: on 127.0.0.1, for its own page alone.
//
// It reads requests of at most 16 KiB without a body, GET and HEAD only, and takes a few seconds for each connection. A
// request must name this server as its host, so that no other site's name can be pointed at it (DNS rebinding),
// and what a page of another site asks for is refused. It keeps nothing between requests.
#pragma once
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

namespace tessera::explore {

struct Request {
  std::string path;
  std::vector<std::pair<std::string, std::string>> query = {};  // decoded, in the order in which they came
};

struct Answer {
  int status = 200;
  std::string type = "application/json";
  std::string body = {};
};

// Runs on several threads at once. What it throws becomes an answer with status 500.
using Handler = std::function<Answer(const Request&)>;

class Server {
 public:
  // It answers from now on, on threads of its own. Port 0 is any that is free. Throws Error that says why it cannot.
  Server(int port, Handler handler);
  ~Server();
  Server(const Server&) = delete;
  Server& operator=(const Server&) = delete;
  int port() const;

 private:
  struct State;
  std::unique_ptr<State> state_;
};

// {"error": message, "field": field}; without a field where that is empty.
Answer refusal(int status, const std::string& message, const std::string& field = "");

}  // namespace tessera::explore
