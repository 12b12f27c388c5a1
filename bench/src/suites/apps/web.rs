//! Web servers: a large file, a proxy before the server, a thread for each connection, and a client of several threads.

use std::fs::{self, File};
use std::io::{self, Write};
use std::net::{Ipv4Addr, SocketAddr};
use std::path::Path;
use std::process::Stdio;

use super::case;
use crate::bed::{Bed, Side, Stack};
use crate::figure::Sample;
use crate::process::{Background, run};
use crate::services::{file_error, fill_once};
use crate::suites::Case;
use crate::suites::conns::PYTHON;
use crate::suites::http::{self, Load, Nginx, Site};
use crate::{Effort, MeasureError};

const PORT: u16 = 8080;
const BACKEND_PORT: u16 = 8081;
const PYTHON_PORT: u16 = 8082;

const THREADED: &str = include_str!("threaded.py");

/// A module for gunicorn and uvicorn.
const PAGES: &str = include_str!("pages.py");

/// Bytes of the large file.
const LARGE: usize = 512 << 20;

/// nginx sends a file that is in memory by sendfile, and wget fetches it several times by one connection.
pub(super) fn sendfile(effort: Effort) -> Case {
    let count = effort.scaled(8.0) as usize;
    case(
        "app-sendfile",
        "Gb/s",
        ["nginx", "wget"],
        move |bed, stack| {
            let root = bed.memory_file("files");
            fill_root(&root)?;
            let site = Site {
                directives: "sendfile on;",
                endpoint: bed.endpoint(PORT),
                root: &root,
            };
            let _server = http::serve(bed, stack, Nginx::OneProcess, &site)?;
            let url = format!("http://{}/large", bed.endpoint(PORT));
            let mut wget = bed.command(Side::Client, stack, "wget");
            wget.args(["--no-proxy", "--no-verbose", "--report-speed=bits"])
                .args(["-O", "/dev/null", "-o", "-"])
                .args(vec![url; count]);
            let output = run(&mut wget)?;
            gigabits_per_second(&output).ok_or(MeasureError::Output {
                program: "wget",
                output,
            })
        },
    )
}

/// wrk opens a connection to HAProxy for each request, and HAProxy one to nginx, over the loopback of the server host.
pub(super) fn through_haproxy(effort: Effort) -> Case {
    let load = closing(effort, "64");
    let programs = ["nginx", "haproxy", "wrk"];
    case("app-haproxy-close", "req/s", programs, move |bed, stack| {
        let backend = (Ipv4Addr::LOCALHOST, BACKEND_PORT).into();
        let _pages = http::serve_page(bed, stack, Nginx::OneProcess, backend)?;
        let _proxy = haproxy(bed, stack, backend)?;
        faultless(bed, stack, &load, PORT)
    })
}

fn haproxy(bed: &Bed, stack: Stack, backend: SocketAddr) -> Result<Background, MeasureError> {
    let config = bed.file("haproxy.cfg");
    let text = format!(
        "global\n maxconn 1000\n\
         defaults\n mode http\n timeout connect 5s\n timeout client 20s\n timeout server 20s\n\
         listen pages\n bind {}\n server nginx {backend}\n",
        bed.endpoint(PORT)
    );
    let path = config.display().to_string();
    fs::write(&config, text).map_err(|source| file_error(&config, source))?;
    Ok(bed.serve(stack, PORT, "haproxy", &["-db", "-f", &path])?)
}

/// The same with nginx as the proxy.
pub(super) fn through_nginx(effort: Effort) -> Case {
    let load = closing(effort, "64");
    case(
        "app-nginx-proxy-close",
        "req/s",
        ["nginx", "wrk"],
        move |bed, stack| {
            let backend = (Ipv4Addr::LOCALHOST, BACKEND_PORT).into();
            let _pages = http::serve_page(bed, stack, Nginx::OneProcess, backend)?;
            let site = Site {
                directives: &format!("location / {{ proxy_pass http://{backend}; }}"),
                endpoint: bed.endpoint(PORT),
                root: &bed.file("www"),
            };
            let _proxy = http::serve(bed, stack, Nginx::OneProcess, &site)?;
            faultless(bed, stack, &load, PORT)
        },
    )
}

/// Two processes of gunicorn accept from one listener, one connection for each request.
pub(super) fn gunicorn(effort: Effort) -> Case {
    let words = [
        "--workers=2",
        "--log-level=critical",
        "pages:wsgi",
        "--bind",
    ];
    python_server(effort, "app-gunicorn-close", "gunicorn", move |bed| {
        let mut words: Vec<String> = words.map(str::to_owned).into();
        words.push(bed.endpoint(PYTHON_PORT).to_string());
        words
    })
}

/// uvicorn has an event loop.
pub(super) fn uvicorn(effort: Effort) -> Case {
    python_server(effort, "app-uvicorn-close", "uvicorn", move |bed| {
        let words = ["--log-level=critical", "pages:asgi", "--host"];
        let mut words: Vec<String> = words.map(str::to_owned).into();
        words.push(bed.server.address.to_string());
        words.extend(["--port".to_owned(), PYTHON_PORT.to_string()]);
        words
    })
}

/// wrk opens a connection for each request to a Python server with the module `pages`.
fn python_server(
    effort: Effort,
    name: &str,
    program: &'static str,
    words: impl Fn(&Bed) -> Vec<String> + 'static,
) -> Case {
    let load = closing(effort, "16");
    case(name, "req/s", [program, "wrk"], move |bed, stack| {
        let module = bed.file("pages.py");
        fs::write(&module, PAGES).map_err(|source| file_error(&module, source))?;
        let mut server = bed.command(Side::Server, stack, program);
        server.args(words(bed));
        server.env("PYTHONPATH", bed.file(""));
        server.stdout(Stdio::null());
        let _server = bed.serve_command(PYTHON_PORT, program, &mut server)?;
        faultless(bed, stack, &load, PYTHON_PORT)
    })
}

/// Python's library starts a thread for each connection, which has one request.
pub(super) fn python(effort: Effort) -> Case {
    let load = closing(effort, "16");
    case(
        "app-python-close",
        "req/s",
        [PYTHON, "wrk"],
        move |bed, stack| {
            let (address, port) = (bed.server.address.to_string(), PYTHON_PORT.to_string());
            let arguments = ["-S", "-E", "-c", THREADED, &address, &port];
            let _server = bed.serve(stack, PYTHON_PORT, PYTHON, &arguments)?;
            faultless(bed, stack, &load, PYTHON_PORT)
        },
    )
}

/// A client of four threads, each with an epoll set of 16 connections, and an nginx of two workers.
pub(super) fn four_threads(effort: Effort) -> Case {
    let load = Load {
        seconds: effort.scaled(3.0),
        threads: "4",
        connections: "64",
        options: &[],
    };
    case(
        "app-wrk-t4",
        "req/s",
        ["nginx", "wrk"],
        move |bed, stack| {
            let workers = Nginx::MasterAndWorkers;
            let _server = http::serve_page(bed, stack, workers, bed.endpoint(PORT))?;
            faultless(bed, stack, &load, PORT)
        },
    )
}

/// A connection for each request.
fn closing(effort: Effort, connections: &'static str) -> Load {
    Load {
        seconds: effort.scaled(3.0),
        threads: "1",
        connections,
        options: &["-H", "Connection: close"],
    }
}

/// Runs wrk. An error of a request fails: a refused request is faster than one that is answered.
fn faultless(bed: &Bed, stack: Stack, load: &Load, port: u16) -> Result<Sample, MeasureError> {
    let url = format!("http://{}/", bed.endpoint(port));
    let output = http::wrk(bed, stack, load, &url)?;
    let is_faulty = ["Socket errors", "Non-2xx"].map(|error| output.contains(error));
    match http::sample(&output) {
        Some(sample) if is_faulty == [false; 2] => Ok(sample),
        _ => Err(MeasureError::Output {
            program: "wrk",
            output,
        }),
    }
}

/// Makes the directory of the large file, whose pages are all in memory.
fn fill_root(root: &Path) -> Result<(), MeasureError> {
    let write = || -> io::Result<()> {
        let block = vec![b'p'; 1 << 20];
        let mut file = File::create(root.join("large"))?;
        (0..LARGE / block.len()).try_for_each(|_| file.write_all(&block))
    };
    fill_once(root, |_| write().map_err(|source| file_error(root, source)))
}

/// Parses wget's last line, `Downloaded: 8 files, 4.0G in 1.6s (21.4 Gb/s)`.
fn gigabits_per_second(output: &str) -> Option<f64> {
    let (_, rate) = output.lines().last()?.rsplit_once('(')?;
    let (number, unit) = rate.strip_suffix(')')?.split_once(' ')?;
    let factor = match unit {
        "Gb/s" => 1.0,
        "Mb/s" => 1e-3,
        "Kb/s" => 1e-6,
        _ => return None,
    };
    Some(number.trim().parse::<f64>().ok()? * factor)
}

#[cfg(test)]
mod tests {
    use super::gigabits_per_second;

    #[test]
    fn the_rate_of_all_downloads_is_read_from_the_last_line() {
        let total = |rate| format!("FINISHED\nDownloaded: 2 files, 1.0G in 0.6s ({rate})");
        assert_eq!(gigabits_per_second(&total("8.02 Gb/s")), Some(8.02));
        assert_eq!(gigabits_per_second(&total("500 Mb/s")), Some(0.5));
        assert_eq!(gigabits_per_second("failed: Connection refused."), None);
    }
}
