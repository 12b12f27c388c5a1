//! Dovecot on the server host: IMAP without TLS for any user, with the password `secret`. A login process passes each
//! connection to a process of its user.

use std::fs::{self, Permissions};
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::Command;

use super::file_error;
use crate::MeasureError;
use crate::bed::{Bed, Stack};
use crate::process::{Background, run};

/// Starts a server whose users share a mailbox with one letter of this body.
pub fn serve(bed: &Bed, stack: Stack, port: u16, body: &str) -> Result<Background, MeasureError> {
    let mail = bed.file("mail");
    deliver(&bed.file(""), &mail, body).map_err(|source| file_error(&mail, source))?;
    run(Command::new("chown").args(["-R", "nobody"]).arg(&mail))?;
    let config = bed.file("dovecot.conf");
    let text = configuration(bed, port, &mail);
    fs::write(&config, text).map_err(|source| file_error(&config, source))?;
    let config = config.display().to_string();
    Ok(bed.serve(stack, port, "dovecot", &["-F", "-c", &config])?)
}

/// Makes a mailbox, which the users' processes may enter.
fn deliver(directory: &Path, mail: &Path, body: &str) -> std::io::Result<()> {
    for folder in ["new", "cur", "tmp"] {
        fs::create_dir_all(mail.join(folder))?;
    }
    let letter = format!("From: a@b\r\nSubject: well\r\n\r\n{body}\r\n");
    fs::write(mail.join("new/1.letter"), letter)?;
    fs::set_permissions(directory, Permissions::from_mode(0o755))
}

fn configuration(bed: &Bed, port: u16, mail: &Path) -> String {
    format!(
        "base_dir = {run}\nstate_dir = {run}\nprotocols = imap\nlisten = {address}\nssl = no\n\
         disable_plaintext_auth = no\nlog_path = {log}\nmail_location = maildir:{mail}\n\
         first_valid_uid = 0\nmail_uid = nobody\nmail_gid = nogroup\n\
         mail_max_userip_connections = 100\n\
         service imap-login {{\n inet_listener imap {{\n port = {port}\n }}\n\
         inet_listener imaps {{\n port = 0\n }}\n}}\n\
         passdb {{\n driver = static\n args = password=secret\n}}\n\
         userdb {{\n driver = static\n args = uid=nobody gid=nogroup home={mail}\n}}\n",
        run = bed.file("dovecot").display(),
        address = bed.server.address,
        log = bed.file("dovecot.log").display(),
        mail = mail.display(),
    )
}
