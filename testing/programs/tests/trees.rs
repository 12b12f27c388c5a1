//! Trees of files that daemons of rsync and git receive and send, each in a child; git's is another
//! program, which uses only its standard input and output.

use std::fs;
use std::path::Path;
use std::process::Command;

use portolan_bench::process::run;
use portolan_programs::{bed, client, each_pairing, file, serve};

/// Files from empty to several hundred thousand bytes that do not compress well.
fn plant(root: &Path) {
    let mut state = 0x2545_f491_4f6c_dd1du64;
    for (number, size) in [0, 1, 1000, 70_000, 400_000]
        .into_iter()
        .cycle()
        .take(60)
        .enumerate()
    {
        let directory = root.join(format!("directory{}", number % 7));
        fs::create_dir_all(&directory).expect("the bed's directory is writable");
        let bytes: Vec<u8> = std::iter::repeat_with(|| {
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            state as u8
        })
        .take(size)
        .collect();
        fs::write(directory.join(number.to_string()), bytes).expect("the same");
    }
}

fn assert_same(left: &Path, right: &Path) {
    let mut diff = Command::new("diff");
    run(diff.args(["-r", "-x", ".git"]).args([left, right])).unwrap_or_else(|e| panic!("{e}"));
}

fn remove(path: &Path) {
    fs::remove_dir_all(path).expect("it is ours");
}

#[test]
fn rsyncs_daemon_takes_and_gives_a_tree() {
    let bed = bed();
    let (source, store, copy) = (bed.file("source"), bed.file("store"), bed.file("copy"));
    each_pairing(&bed, |bed, pairing| {
        plant(&source);
        fs::create_dir_all(&store).expect("the bed's directory is writable");
        let config = file(
            bed,
            "rsyncd.conf",
            format!(
                "use chroot = no\naddress = {}\nport = 8730\nlog file = {}\n\
                 [tree]\npath = {}\nread only = false\nuid = root\ngid = root\n",
                bed.server.address,
                bed.file("rsync.log").display(),
                store.display()
            ),
        );
        let config = format!("--config={config}");
        let options = ["--daemon", "--no-detach", &config];
        let _rsync = serve(bed, pairing.server, 8730, "rsync", &options);
        let tree = format!("rsync://{}/tree/", bed.endpoint(8730));
        let rsync = |from: &str, to: &str| {
            let options = ["-a", "--checksum", "--timeout=20", from, to];
            client(bed, pairing.client, "rsync", &options);
        };
        let here = format!("{}/", source.display());
        rsync(&here, &tree);
        assert_same(&source, &store);
        // The second time only differences are transferred, in each direction in turn.
        fs::write(source.join("directory3").join("3"), "other").expect("it is ours");
        rsync(&here, &tree);
        assert_same(&source, &store);
        rsync(&tree, &format!("{}/", copy.display()));
        assert_same(&source, &copy);
        for tree in [&source, &store, &copy] {
            remove(tree);
        }
    });
}

fn git(directory: &Path, arguments: &[&str]) {
    let mut git = Command::new("git");
    git.args([
        "-c",
        "user.name=nobody",
        "-c",
        "user.email=nobody@example.org",
    ]);
    git.arg("-C").arg(directory).args(arguments);
    run(&mut git).unwrap_or_else(|error| panic!("{error}"));
}

#[test]
fn gits_daemon_is_cloned_from_and_pushed_to() {
    let bed = bed();
    let (source, clone) = (bed.file("source"), bed.file("clone"));
    plant(&source);
    git(&source, &["init", "-q", "-b", "main"]);
    git(&source, &["add", "."]);
    git(&source, &["commit", "-qm", "Plant the tree"]);
    git(&source, &["clone", "-q", "--bare", ".", "../store.git"]);
    let base = bed.file("").display().to_string();
    let address = bed.server.address.to_string();
    each_pairing(&bed, |bed, pairing| {
        let _daemon = serve(
            bed,
            pairing.server,
            9418,
            "git",
            &[
                "daemon",
                "--reuseaddr",
                "--export-all",
                "--enable=receive-pack",
                &format!("--listen={address}"),
                &format!("--base-path={base}"),
                &base,
            ],
        );
        let url = format!("git://{}/store.git", bed.endpoint(9418));
        let there = clone.display().to_string();
        let remote = |arguments: &[&str]| client(bed, pairing.client, "git", arguments);
        remote(&["clone", "-q", &url, &there]);
        assert_same(&source, &clone);
        plant(&clone.join("grown"));
        git(&clone, &["add", "."]);
        git(
            &clone,
            &["commit", "-q", "--allow-empty", "-m", "Let it grow"],
        );
        remote(&["-C", &there, "push", "-q", "origin", "main"]);
        let (head, pushed) = ("refs/heads/main", "refs/remotes/origin/main");
        let store = bed.file("store.git");
        assert_eq!(revision(&store, head), revision(&clone, pushed));
        git(&source, &["pull", "-q", "../store.git", "main"]);
        assert_same(&source, &clone);
        remove(&clone);
    });
}

fn revision(directory: &Path, name: &str) -> String {
    let mut git = Command::new("git");
    run(git.arg("-C").arg(directory).args(["rev-parse", name])).unwrap_or_else(|e| panic!("{e}"))
}
