// The command `explore`: an HTTP server based on GNU libmicrohttpd, which limits each connection's memory and time.
#include <arpa/inet.h>
#include <microhttpd.h>
#include <netinet/in.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cerrno>
#include <chrono>
#include <cstdint>
#include <cstring>
#include <fstream>
#include <iostream>
#include <iterator>
#include <map>
#include <memory>
#include <sstream>
#include <string>
#include <string_view>
#include <vector>

#include "app/commands.h"
#include "app/explore/explore.h"
#include "app/output.h"

namespace tessera::explore {
namespace {

constexpr size_t kMaxBytes = 16384;  // memory limit of a connection, including its request
constexpr unsigned kMaxConnections = 800;
constexpr unsigned kSeconds = 3;  // timeout of an idle connection
constexpr unsigned kThreads = 4;  // one for a search, the others for predictions
constexpr size_t kMaxKeys = 64;

// Other origins may neither embed nor read pages, and the page loads nothing from other origins.
constexpr std::pair<const char*, const char*> kHeaders[] = {
    {"Content-Security-Policy",
     "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; connect-src 'self'; img-src data: "
     "blob:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"},
    {"X-Content-Type-Options", "nosniff"},
    {"Cross-Origin-Resource-Policy", "same-origin"},
    {"Referrer-Policy", "no-referrer"},
    {"Cache-Control", "no-store"},
    {"Connection", "close"},  // the next request is handled by an idle thread
};

// On the loopback interface.
int listen_on(int port, int& bound) {
  const int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
  const int yes = 1;
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_port = htons(static_cast<uint16_t>(port));
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  socklen_t size = sizeof address;
  auto* const raw = reinterpret_cast<sockaddr*>(&address);
  if (fd >= 0 && setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &yes, sizeof yes) == 0 && bind(fd, raw, size) == 0 &&
      listen(fd, SOMAXCONN) == 0 && getsockname(fd, raw, &size) == 0) {
    bound = ntohs(address.sin_port);
    return fd;
  }
  const int cause = errno;
  if (fd >= 0) close(fd);
  throw Error(cause == EADDRINUSE
                  ? fmt::format("expected a free port, got {}, which is in use", port)
                  : fmt::format("cannot listen on port {} of 127.0.0.1: {}", port, std::strerror(cause)));
}

MHD_Result queue(MHD_Connection* connection, const Answer& answer) {
  MHD_Response* const response =
      MHD_create_response_from_buffer(answer.body.size(), const_cast<char*>(answer.body.data()), MHD_RESPMEM_MUST_COPY);
  if (response == nullptr) return MHD_NO;
  for (const auto& [name, value] : kHeaders) MHD_add_response_header(response, name, value);
  MHD_add_response_header(response, "Content-Type", (answer.type + "; charset=utf-8").c_str());
  if (answer.status == 405) MHD_add_response_header(response, "Allow", "GET, HEAD");
  const MHD_Result result = MHD_queue_response(connection, static_cast<unsigned>(answer.status), response);
  MHD_destroy_response(response);
  return result;
}

struct Headers {
  std::vector<std::string> hosts;
  std::string site;
};
MHD_Result take_header(void* to, MHD_ValueKind, const char* key, const char* value) {
  Headers& headers = *static_cast<Headers*>(to);
  if (strcasecmp(key, "Host") == 0) headers.hosts.emplace_back(value != nullptr ? value : "");
  if (strcasecmp(key, "Sec-Fetch-Site") == 0 && value != nullptr) headers.site = value;
  return MHD_YES;
}
MHD_Result take_argument(void* to, MHD_ValueKind, const char* key, size_t key_size, const char* value,
                         size_t value_size) {
  auto& query = *static_cast<decltype(Request::query)*>(to);
  query.emplace_back(std::string(key, key_size), value != nullptr ? std::string(value, value_size) : "");
  return query.size() <= kMaxKeys ? MHD_YES : MHD_NO;
}

// Whether the client process still has its half-closed connection open: the kernel lists open sockets with their inode,
// closed ones with 0.
bool is_open(const sockaddr* client, int port) {
  const auto end = [](int of) { return fmt::format(":{:04X}", of); };
  const std::string from = end(ntohs(reinterpret_cast<const sockaddr_in*>(client)->sin_port)), to = end(port);
  for (const char* table : {"/proc/net/tcp", "/proc/net/tcp6"}) {
    std::ifstream file(table);
    for (std::string line; std::getline(file, line);) {
      std::istringstream in(line);
      const std::vector<std::string> fields{std::istream_iterator<std::string>(in), {}};
      if (fields.size() > 9 && fields[1].ends_with(from) && fields[2].ends_with(to)) return fields[9] != "0";
    }
  }
  return false;
}

// Throws Error after the client has disconnected; polls at most 20 times per second.
planner::ProgressCallback client_watch(MHD_Connection* connection, int port) {
  const int fd = MHD_get_connection_info(connection, MHD_CONNECTION_INFO_CONNECTION_FD)->connect_fd;
  const sockaddr* client_at = MHD_get_connection_info(connection, MHD_CONNECTION_INFO_CLIENT_ADDRESS)->client_addr;
  return [fd, client_at, port, next = std::chrono::steady_clock::now()]() mutable {
    if (std::chrono::steady_clock::now() < next) return;
    next = std::chrono::steady_clock::now() + std::chrono::milliseconds(50);
    pollfd client{.fd = fd, .events = POLLRDHUP, .revents = 0};
    if (poll(&client, 1, 0) > 0 && ((client.revents & (POLLHUP | POLLERR)) != 0 || !is_open(client_at, port)))
      throw Error("the client closed the connection before the response");
  };
}

bool has_body(MHD_Connection* connection) {
  const char* const length = MHD_lookup_connection_value(connection, MHD_HEADER_KIND, "Content-Length");
  return (length != nullptr && strcmp(length, "0") != 0) ||
         MHD_lookup_connection_value(connection, MHD_HEADER_KIND, "Transfer-Encoding") != nullptr;
}

class Server {
 public:
  // Serves on separate threads. Port 0 selects any free port. Throws Error with the cause.
  explicit Server(int port)
      : socket_(listen_on(port, port_)),
        daemon_(MHD_start_daemon(MHD_USE_EPOLL_INTERNAL_THREAD, 0, nullptr, nullptr, on_request, this,
                                 MHD_OPTION_LISTEN_SOCKET, socket_, MHD_OPTION_CONNECTION_MEMORY_LIMIT, kMaxBytes,
                                 MHD_OPTION_CONNECTION_LIMIT, kMaxConnections, MHD_OPTION_CONNECTION_TIMEOUT, kSeconds,
                                 MHD_OPTION_THREAD_POOL_SIZE, kThreads, MHD_OPTION_STRICT_FOR_CLIENT, 1,
                                 MHD_OPTION_SIGPIPE_HANDLED_BY_APP, 1, MHD_OPTION_END)) {
    if (daemon_ != nullptr) return;
    close(socket_);
    throw Error("the web server cannot start", Status::communication);
  }
  ~Server() { MHD_stop_daemon(daemon_); }
  Server(const Server&) = delete;
  Server& operator=(const Server&) = delete;
  int port() const { return port_; }

 private:
  bool is_ours(const std::vector<std::string>& hosts) const {
    if (hosts.size() != 1) return false;
    for (const char* name : {"127.0.0.1", "localhost"}) {
      const std::string with_port = fmt::format("{}:{}", name, port_);
      if (strcasecmp(hosts[0].c_str(), with_port.c_str()) == 0) return true;
      if (port_ == 80 && strcasecmp(hosts[0].c_str(), name) == 0) return true;
    }
    return false;
  }

  Answer answered(MHD_Connection* connection, const char* path, std::string_view method) const {
    Headers headers;
    MHD_get_connection_values(connection, MHD_HEADER_KIND, take_header, &headers);
    if (!is_ours(headers.hosts)) return refusal(403, fmt::format("expected the host 127.0.0.1:{} or localhost", port_));
    if (method != "GET" && method != "HEAD") return refusal(405, "expected GET or HEAD");
    if (has_body(connection)) return refusal(413, "expected a request without a body");
    Request request{.path = path, .meanwhile = client_watch(connection, port_)};
    const bool is_page = request.path == "/";  // links on other sites may open the page
    if (!is_page && !headers.site.empty() && headers.site != "same-origin" && headers.site != "none")
      return refusal(403, "expected a request from this server's page, got one from a different site");
    MHD_get_connection_values_n(connection, MHD_GET_ARGUMENT_KIND, take_argument, &request.query);
    if (request.query.size() > kMaxKeys) return refusal(400, fmt::format("expected at most {} keys", kMaxKeys));
    return answer(request);
  }

  // Called after the headers, when requests with a body are rejected, and after the complete request.
  static MHD_Result on_request(void* self, MHD_Connection* connection, const char* path, const char* method,
                               const char*, const char*, size_t* body, void** context) {
    static char mark;
    const bool first = *context == nullptr;
    *context = &mark;
    const bool may_be = strcmp(method, "GET") == 0 || strcmp(method, "HEAD") == 0;
    if (first && may_be && !has_body(connection)) return MHD_YES;
    *body = 0;
    try {
      return queue(connection, static_cast<const Server*>(self)->answered(connection, path, method));
    } catch (const std::exception& e) {
      return queue(connection, refusal(500, e.what()));
    }
  }

  int port_ = 0, socket_;
  MHD_Daemon* daemon_;
};

constexpr int kDefaultPort = 8421;

// Without --port, binds the default port or, if it is in use, any free port.
std::unique_ptr<Server> server_for(const ExploreOptions& o) {
  try {
    return std::make_unique<Server>(static_cast<int>(o.port.value_or(kDefaultPort)));
  } catch (const Error& e) {
    if (o.port) throw Error(fmt::format("--port: {}", e.what()), e.status());
    return std::make_unique<Server>(0);
  }
}

}  // namespace

Answer refusal(int status, const std::string& message, const std::string& field) {
  nlohmann::ordered_json json = {{"error", one_line(message)}};
  if (!field.empty()) json["field"] = one_line(field);
  return {.status = status, .body = json.dump(-1, ' ', false, nlohmann::json::error_handler_t::replace)};
}

}  // namespace tessera::explore

int tessera::run(const ExploreOptions& o) {
  const std::unique_ptr<explore::Server> server = explore::server_for(o);
  const bool moved = !o.port && server->port() != explore::kDefaultPort;
  print(fmt::format("{}planner at http://127.0.0.1:{}/; press Ctrl-C to stop\n",
                    moved ? fmt::format("port {} is in use; ", explore::kDefaultPort) : "", server->port()));
  for (;;) pause();  // ended by a signal (app/signals.h)
}
