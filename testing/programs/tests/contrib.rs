//! What Portolan has for other systems: systemd's units, scripts for bpftrace, a container image.

use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Duration;

use portolan_bench::bed::{Bed, Stack};
use portolan_bench::process::{Background, run};
use portolan_programs::stream::{connect, exchange};
use portolan_programs::{PYTHON, bed, eventually, file};
use rustix::process::Signal;
use serde_json::Value;

const PORT: u16 = 7094;

/// Echoes in processes that are forked while their parent is traced.
const ECHO: &str = "import os, signal, socket, sys
signal.signal(signal.SIGCHLD, signal.SIG_IGN)
listener = socket.create_server((sys.argv[1], int(sys.argv[2])))
while True:
    with listener.accept()[0] as connection:
        if os.fork() == 0:
            while received := connection.recv(4096):
                connection.sendall(received)
            os._exit(0)";

fn in_repository(path: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("../..")
        .join(path)
}

#[test]
fn services_are_confined() {
    for unit in [
        "portoland.service",
        "portoland@.service",
        "portolan-metrics.service",
    ] {
        let path = in_repository("contrib/systemd").join(unit);
        // In tenths: 3.0.
        let options = ["security", "--no-pager", "--offline=true", "--threshold=30"];
        run(Command::new("systemd-analyze").args(options).arg(path))
            .unwrap_or_else(|error| panic!("{unit}: {error}"));
    }
}

/// Each script, and what it prints while an echo server works, or when it ends.
const SCRIPTS: [(&str, &str); 6] = [
    ("batches", "@frames_for_a_look[python3"),
    ("calls", "@calls[python3"),
    ("migrations", " cache "),
    ("sequence", " out  7094 "),
    ("sizes", "@sent_bytes[python3"),
    ("sleeps", "@slept_us[python3"),
];

/// A script that runs, with the paths of the programs in the build directory.
fn trace(bed: &Bed, script: &str) -> (Background, PathBuf) {
    let path = in_repository("contrib/bpftrace").join(format!("{script}.bt"));
    let installed = [
        "/usr/lib/portolan/libportolan_preload.so",
        "/usr/sbin/portoland",
    ];
    let mut text = fs::read_to_string(path).expect("it is there");
    for path in installed {
        let name = Path::new(path).file_name().and_then(|name| name.to_str());
        let built = bed.tools().beside(name.expect("a file"));
        let built = fs::canonicalize(built).expect("cargo build has made it");
        text = text.replace(path, &built.display().to_string());
    }
    let text = file(bed, &format!("{script}.bt"), text);
    let said = bed.file(&format!("{script}.said"));
    let mut command = Command::new("bpftrace");
    command.arg(text).stdin(Stdio::null());
    let output = File::create(&said).expect("the bed's directory is writable");
    command.stderr(output.try_clone().expect("there are descriptors"));
    command.stdout(output);
    let tracer = Background::start_with_output(&mut command);
    (tracer.unwrap_or_else(|error| panic!("{error}")), said)
}

/// Opens a connection to the echo server, uses it, and closes it.
fn use_server(bed: &Bed) {
    let mut stream = connect(bed, PORT);
    for _ in 0..5 {
        exchange(&mut stream, 1, 1000);
        std::thread::sleep(Duration::from_millis(20));
    }
}

#[test]
fn scripts_for_bpftrace_show_what_a_server_does() {
    let bed = bed();
    let address = bed.server.address.to_string();
    let words = ["-c", ECHO, &address, &PORT.to_string()];
    let _server = bed
        .serve(Stack::Portolan, PORT, PYTHON, &words)
        .unwrap_or_else(|error| panic!("{error}"));
    for (script, expected) in SCRIPTS {
        // Probes are attached a while after the script says so, the longer the busier the machine is.
        let mut said = String::new();
        let is_shown = [10, 50, 250].into_iter().any(|connections| {
            said = traced(&bed, script, connections);
            said.contains(expected)
        });
        assert!(is_shown, "{script}: {said}");
    }
}

/// Returns what a script says about an echo server that serves so many connections. Maps are printed at the end.
fn traced(bed: &Bed, script: &str, connections: u32) -> String {
    let (mut tracer, said) = trace(bed, script);
    let said = || fs::read_to_string(&said).unwrap_or_default();
    let limit = Duration::from_secs(20);
    assert!(
        eventually(limit, || said().contains("Attaching")),
        "{script}"
    );
    for _ in 0..connections {
        use_server(bed);
    }
    tracer.signal(Signal::INT).expect("it runs");
    assert!(tracer.wait(limit), "{script}");
    said()
}

/// Makes the image of the programs in the build directory.
fn image(bed: &Bed) -> PathBuf {
    let stage = bed.file("stage");
    for path in [
        "usr/bin/portolan",
        "usr/sbin/portoland",
        "usr/lib/portolan/libportolan_preload.so",
    ] {
        let path = stage.join(path);
        fs::create_dir_all(path.parent().expect("a folder")).expect("room on the disk");
        let built = bed.tools().beside(
            path.file_name()
                .and_then(|name| name.to_str())
                .expect("a file"),
        );
        fs::copy(built, path).expect("cargo build has made it");
    }
    let image = bed.file("image");
    let mut make = Command::new("python3");
    make.arg(in_repository("scripts/oci-image")).arg(&image);
    run(make.arg(&stage)).unwrap_or_else(|error| panic!("{error}"));
    image
}

/// Returns the path of a blob of an image, which has the digest and the size that its descriptor states.
fn blob(image: &Path, descriptor: &Value) -> PathBuf {
    let digest = descriptor["digest"].as_str().expect("a digest");
    let (_, digest) = digest.split_once(':').expect("with its algorithm");
    let path = image.join("blobs/sha256").join(digest);
    let size = fs::metadata(&path).expect("the blob is there").len();
    assert_eq!(descriptor["size"].as_u64(), Some(size));
    let sum = run(Command::new("sha256sum").arg(&path)).expect("coreutils");
    assert!(sum.starts_with(digest), "{sum}");
    path
}

fn value(path: &Path) -> Value {
    let text = fs::read_to_string(path).expect("it is there");
    serde_json::from_str(&text).expect("it is JSON")
}

#[test]
fn the_container_image_is_complete() {
    let bed = bed();
    let image = image(&bed);
    assert_eq!(
        value(&image.join("oci-layout"))["imageLayoutVersion"],
        "1.0.0"
    );
    let index = value(&image.join("index.json"));
    let manifest = value(&blob(&image, &index["manifests"][0]));
    let config = value(&blob(&image, &manifest["config"]));
    assert_eq!(config["config"]["Entrypoint"][0], "/usr/sbin/portoland");

    let root = bed.file("root");
    fs::create_dir(&root).expect("room on the disk");
    let layer = blob(&image, &manifest["layers"][0]);
    let mut unpack = Command::new("tar");
    run(unpack.arg("-xzf").arg(layer).arg("-C").arg(&root)).expect("it is a tar file");
    let in_image = |words: &[&str]| {
        let said = run(Command::new("chroot").arg(&root).args(words));
        said.unwrap_or_else(|error| panic!("{words:?}: {error}"))
    };
    for program in ["/usr/sbin/portoland", "/usr/bin/portolan"] {
        assert!(in_image(&[program, "--version"]).contains("protocol"));
    }
    assert!(root.join("etc/portoland.toml").is_file());
}
