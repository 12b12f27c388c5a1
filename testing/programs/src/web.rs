//! An nginx with one page, and a client of the kernel's stack that opens a connection for each request.

use std::fs;
use std::process::{Child, Command, Stdio};

use portolan_bench::bed::{Bed, Side, Stack};
use portolan_bench::process::Background;

use crate::file;

/// Starts an nginx on Portolan that serves `page`. `processes` are the directives that say how many it has.
///
/// # Panics
/// If it does not start.
pub fn nginx(
    bed: &Bed,
    port: u16,
    (processes, page): (&str, String),
    prepare: impl FnOnce(&mut Command),
) -> Background {
    let endpoint = bed.endpoint(port);
    let page = file(bed, "page", page);
    let root = fs::canonicalize(page).expect("it is there");
    let root = root.parent().expect("a folder").display();
    let (pid, log) = (bed.file("nginx.pid"), bed.file("nginx.log"));
    let config = format!(
        "daemon off; {processes} pid {}; error_log {};\n\
         events {{ worker_connections 512; }}\n\
         http {{ access_log off; server {{ listen {endpoint}; root {root}; }} }}\n",
        pid.display(),
        log.display()
    );
    let config = file(bed, "nginx.conf", config);
    let mut nginx = bed.command(Side::Server, Stack::Portolan, "/usr/sbin/nginx");
    nginx.args(["-c", &config]).stdout(Stdio::null());
    prepare(&mut nginx);
    let nginx = bed.serve_command(port, "nginx", &mut nginx);
    nginx.unwrap_or_else(|error| panic!("{error}"))
}

/// Has ten connections requested of the page at a time.
///
/// # Panics
/// If the client does not start.
pub fn start_load(bed: &Bed, port: u16, seconds: u32) -> Child {
    let url = format!("http://{}/page", bed.endpoint(port));
    let seconds = seconds.to_string();
    let mut load = bed.command(Side::Client, Stack::Kernel, "ab");
    load.args(["-t", &seconds, "-n", "1000000", "-c", "10", &url]);
    let load = load.stdout(Stdio::piped()).stderr(Stdio::piped());
    load.spawn().expect("it starts")
}

/// Waits for the end of the load.
///
/// # Panics
/// If a request has failed.
pub fn assert_none_failed(load: Child) {
    let output = load.wait_with_output().expect("it ends");
    let told = String::from_utf8_lossy(&output.stdout);
    let failed = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{told}{failed}");
    let has_failed_none = |line: &str| line.starts_with("Failed requests:") && line.ends_with(" 0");
    assert!(told.lines().any(has_failed_none), "{told}{failed}");
}
