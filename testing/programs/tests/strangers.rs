//! Servers that shut their children up: in namespaces, under other users, with an environment of their own.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::process::Command;

use portolan_bench::bed::{Bed, Side};
use portolan_bench::process::{Background, run};
use portolan_programs::{PAIRINGS, Pairing, bed, client, counter, file, serve};

/// Each is begun anew so often, since stalls depend on the moment.
const STARTS: usize = 20;

/// Starts a server so often for each pairing of stacks, and uses it each time.
fn each_start(start: impl Fn(&Bed, Pairing) -> Background, use_it: impl Fn(&Bed, Pairing, usize)) {
    let bed = bed();
    for pairing in PAIRINGS {
        for turn in 0..STARTS {
            eprintln!("{pairing:?}, {turn}");
            let _server = start(&bed, pairing);
            use_it(&bed, pairing, turn);
        }
    }
    let served = counter(&bed, Side::Server, "server", "passive_opens");
    assert!(
        served >= 2 * STARTS as u64,
        "{served} connections were Portolan's"
    );
}

fn curl(bed: &Bed, pairing: Pairing, arguments: &[&str]) -> String {
    let arguments = [&["-sS", "--max-time", "15"], arguments].concat();
    client(bed, pairing.client, "curl", &arguments)
}

fn open_to_all(path: &std::path::Path) {
    fs::set_permissions(path, fs::Permissions::from_mode(0o755)).expect("it is ours");
}

/// Its sessions are in namespaces of their own, without a network, and give their user up by libc.
#[test]
fn vsftpd_lets_in_and_gives_files() {
    const PORT: u16 = 7121;
    // What its package's service makes.
    fs::create_dir_all("/run/vsftpd/empty").expect("root");
    let start = |bed: &Bed, pairing: Pairing| {
        let root = bed.file("ftp");
        fs::create_dir_all(&root).expect("the bed's directory is writable");
        let bytes: Vec<u8> = (0..3_000_000u32).map(|i| (i ^ (i >> 9)) as u8).collect();
        fs::write(root.join("large"), bytes).expect("it is ours");
        fs::write(root.join("small"), "well").expect("it is ours");
        open_to_all(bed.file("").as_path());
        open_to_all(&root);
        let text = format!(
            "listen=YES\nbackground=NO\nlisten_port={PORT}\nlisten_address={}\nanon_root={}\n",
            bed.server.address,
            root.display(),
        );
        let config = file(bed, "vsftpd.conf", text);
        serve(bed, pairing.server, PORT, "vsftpd", &[&config])
    };
    each_start(start, |bed, pairing, _| {
        let base = format!("ftp://{}", bed.endpoint(PORT));
        assert_eq!(curl(bed, pairing, &[&format!("{base}/small")]), "well");
        let copy = bed.file("copy").display().to_string();
        curl(bed, pairing, &["-o", &copy, &format!("{base}/large")]);
        let (sent, got) = (fs::read(bed.file("ftp").join("large")), fs::read(&copy));
        assert!(sent.expect("it is there") == got.expect("it came"));
    });
}

/// A process that lets in passes its connection on to one that was started with an environment of its own.
#[test]
fn dovecot_lets_in_and_gives_mail() {
    const PORT: u16 = 7143;
    let start = |bed: &Bed, pairing: Pairing| {
        let mail = bed.file("mail");
        for folder in ["new", "cur", "tmp"] {
            fs::create_dir_all(mail.join(folder)).expect("the bed's directory is writable");
        }
        let body = "words ".repeat(20_000);
        let letter = format!("From: a@b\r\nSubject: well\r\n\r\n{body}\r\n");
        fs::write(mail.join("new/1.letter"), letter).expect("it is ours");
        open_to_all(bed.file("").as_path());
        run(Command::new("chown").args(["-R", "nobody"]).arg(&mail)).expect("root");
        let text = format!(
            "base_dir = {run}\nstate_dir = {run}\nprotocols = imap\nlisten = {address}\nssl = no\n\
             disable_plaintext_auth = no\nlog_path = {log}\nmail_location = maildir:{mail}\n\
             first_valid_uid = 0\nmail_uid = nobody\nmail_gid = nogroup\n\
             service imap-login {{\n inet_listener imap {{\n port = {PORT}\n }}\n\
             inet_listener imaps {{\n port = 0\n }}\n}}\n\
             passdb {{\n driver = static\n args = password=secret\n}}\n\
             userdb {{\n driver = static\n args = uid=nobody gid=nogroup home={mail}\n}}\n",
            run = bed.file("dovecot").display(),
            address = bed.server.address,
            log = bed.file("dovecot.log").display(),
            mail = mail.display(),
        );
        let config = file(bed, "dovecot.conf", text);
        serve(bed, pairing.server, PORT, "dovecot", &["-F", "-c", &config])
    };
    each_start(start, |bed, pairing, _| {
        let base = format!("imap://{}", bed.endpoint(PORT));
        let user = ["--user", "someone:secret"];
        let letter = curl(
            bed,
            pairing,
            &[&user[..], &[&format!("{base}/INBOX;MAILINDEX=1")]].concat(),
        );
        assert!(letter.contains("Subject: well"));
        assert_eq!(letter.matches("words").count(), 20_000);
    });
}
