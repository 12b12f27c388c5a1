//! `portolan enable` and `disable`: a drop-in that puts a systemd service on Portolan. It preloads the socket proxy by
//! LD_PRELOAD, so that ExecStart=, and with it Type=, NoExecPaths= and PIDFile=, stay as they are.

mod unit;

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, anyhow, bail, ensure};

use self::unit::Unit;
use crate::exit::{Failure, print};
use crate::ps::Reason;
use crate::run::find_preload;

/// The first line of the drop-in, which identifies it as ours.
const MARK: &str = "# Written by `portolan enable`; `portolan disable` removes it.";

const FILE: &str = "portolan.conf";

/// For PostgreSQL's clusters on Debian: pg_ctlcluster replaces the environment with that in a file of the cluster.
const ENVIRONMENT: &str = "portolan.environment";

#[derive(clap::Args)]
pub(crate) struct Arguments {
    /// Fail, instead of using the kernel's sockets, while no server runs.
    #[arg(long)]
    require: bool,
    /// Poll the ring for this many microseconds before a waiting thread sleeps.
    #[arg(long, value_name = "US")]
    spin: Option<u32>,
    /// Perform the handshakes of listeners in the service itself.
    #[arg(long)]
    delegate: bool,
    /// Print the drop-in instead of writing it.
    #[arg(long)]
    dry_run: bool,
    /// The directory that drop-ins are written to.
    #[arg(
        long,
        value_name = "DIRECTORY",
        default_value = "/etc/systemd/system",
        hide = true
    )]
    directory: PathBuf,
    /// The service, such as redis-server, nginx or postgresql@.
    unit: String,
}

#[derive(clap::Args)]
pub(crate) struct DisableArguments {
    /// The directory that drop-ins were written to.
    #[arg(
        long,
        value_name = "DIRECTORY",
        default_value = "/etc/systemd/system",
        hide = true
    )]
    directory: PathBuf,
    /// The service.
    unit: String,
}

pub(crate) fn run(arguments: &Arguments) -> Result<(), Failure> {
    let name = service_name(&arguments.unit)?;
    let unit = Unit::find(&name)?;
    // A preload library beside this program is found by a path that contains `..`.
    let preload = fs::canonicalize(find_preload()?)?;
    let text = arguments.drop_in(&unit, &preload)?;
    if arguments.dry_run {
        return print(text.trim_end());
    }
    let directory = arguments.directory.join(format!("{name}.d"));
    let path = directory.join(FILE);
    ensure_own(&path)?;
    fs::create_dir_all(&directory).with_context(|| directory.display().to_string())?;
    if unit.has_cluster() {
        let environment = directory.join(ENVIRONMENT);
        fs::write(&environment, arguments.environment(&preload))
            .with_context(|| environment.display().to_string())?;
    }
    fs::write(&path, text).with_context(|| path.display().to_string())?;
    reload();
    print(format!("{}\nsystemctl restart {name}", path.display()))
}

pub(crate) fn disable(arguments: &DisableArguments) -> Result<(), Failure> {
    let name = service_name(&arguments.unit)?;
    let directory = arguments.directory.join(format!("{name}.d"));
    let path = directory.join(FILE);
    ensure_own(&path)?;
    fs::remove_file(&path).with_context(|| path.display().to_string())?;
    let _ = fs::remove_file(directory.join(ENVIRONMENT));
    // Fails if the directory has other drop-ins.
    let _ = fs::remove_dir(&directory);
    reload();
    print(format!(
        "removed {}\nsystemctl restart {name}",
        path.display()
    ))
}

/// Completes `redis-server` to `redis-server.service`.
fn service_name(name: &str) -> anyhow::Result<String> {
    let is_plain = |c: char| c.is_ascii_alphanumeric() || "-_.@:\\".contains(c);
    ensure!(
        !name.is_empty() && !name.starts_with('.') && name.chars().all(is_plain),
        "{name:?} is not the name of a service"
    );
    match name.rsplit_once('.') {
        Some((_, "service")) => Ok(name.to_owned()),
        Some((_, kind @ ("socket" | "target" | "timer" | "mount" | "path" | "slice"))) => {
            bail!("{name} is a {kind} unit: only services have sockets of their own")
        }
        _ => Ok(format!("{name}.service")),
    }
}

/// Refuses to replace or remove a file that this command did not write.
fn ensure_own(path: &Path) -> anyhow::Result<()> {
    match fs::read_to_string(path) {
        Ok(text) => ensure!(text.starts_with(MARK), "{} is not ours", path.display()),
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => {}
        Err(error) => bail!("{}: {error}", path.display()),
    }
    Ok(())
}

/// Reloads systemd's units, if systemd runs.
fn reload() {
    if Path::new("/run/systemd/system").is_dir() {
        // systemctl reports errors on standard error itself.
        let _ = Command::new("systemctl").arg("daemon-reload").status();
    }
}

impl Arguments {
    /// Returns the environment variables to set, except LD_PRELOAD.
    fn settings(&self) -> impl Iterator<Item = (&'static str, String)> {
        let settings = [
            self.require.then(|| ("PORTOLAN", "require".to_owned())),
            self.spin.map(|spin| ("PORTOLAN_SPIN", spin.to_string())),
            self.delegate.then(|| ("PORTOLAN_DELEGATE", "1".to_owned())),
        ];
        settings.into_iter().flatten()
    }

    /// Returns the variables in the syntax of pg_ctlcluster(1).
    fn environment(&self, preload: &Path) -> String {
        let preload = ("LD_PRELOAD", preload.display().to_string());
        let variables = std::iter::once(preload).chain(self.settings());
        let lines = variables.map(|(name, value)| format!("{name} = '{value}'\n"));
        format!("{MARK}\n{}", lines.collect::<String>())
    }

    fn drop_in(&self, unit: &Unit, preload: &Path) -> anyhow::Result<String> {
        refuse(unit)?;
        let directory = preload
            .parent()
            .ok_or_else(|| anyhow!("the proxy lies nowhere"))?;
        let mut lines = vec![
            MARK.to_owned(),
            "[Unit]".to_owned(),
            "After=portoland.service".to_owned(),
            "Wants=portoland.service".to_owned(),
            String::new(),
            "[Service]".to_owned(),
        ];
        let others = unit.environment("LD_PRELOAD");
        let others = others.map_or_else(String::new, |others| format!(":{others}"));
        lines.push(format!(
            "Environment=\"LD_PRELOAD={}{others}\"",
            preload.display()
        ));
        lines.extend(
            self.settings()
                .map(|(name, value)| format!("Environment={name}={value}")),
        );
        if unit.has_cluster() {
            lines.push(format!(
                "BindReadOnlyPaths=/etc/systemd/system/%n.d/{ENVIRONMENT}:/etc/postgresql/%I/environment"
            ));
        }
        if unit.may_not_execute(directory) {
            lines.push(format!("ExecPaths={}", directory.display()));
        }
        if unit.lacks_family("AF_UNIX") {
            lines.push("RestrictAddressFamilies=AF_UNIX".to_owned());
        }
        if unit.hides_run() {
            lines.push("BindReadOnlyPaths=/run/portolan".to_owned());
        }
        Ok(lines.join("\n") + "\n")
    }
}

/// Refuses services with settings that a drop-in cannot make up for.
fn refuse(unit: &Unit) -> anyhow::Result<()> {
    if unit.is_set("PrivateNetwork") || unit.last("NetworkNamespacePath").is_some() {
        bail!("the service has a network namespace of its own, where this server is not");
    }
    for key in ["RootDirectory", "RootImage"] {
        if let Some(value) = unit.last(key) {
            bail!(
                "the service has another root ({key}={value}): the proxy must be installed there"
            );
        }
    }
    if unit.denies_family("AF_UNIX") {
        bail!(
            "the service may not use UNIX sockets (RestrictAddressFamilies=), which Portolan needs"
        );
    }
    for program in unit.programs() {
        match Reason::of_program(program.as_ref()) {
            Reason::Portolan | Reason::NotFound => {}
            reason => {
                let words = reason.words().trim_start_matches("kernel: ");
                bail!("{program} {words}; {}", reason.advice().unwrap_or_default());
            }
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;

    #[derive(Parser)]
    struct Line {
        #[command(flatten)]
        arguments: Arguments,
    }

    fn drop_in(words: &[&str], unit: &str) -> anyhow::Result<String> {
        let line = Line::parse_from([&["enable", "x"], words].concat());
        line.arguments
            .drop_in(&Unit::parse(unit), Path::new("/usr/lib/portolan/p.so"))
    }

    #[test]
    fn a_service_gets_the_proxy_and_what_its_confinement_lacks() {
        let plain = drop_in(&[], "[Service]\nExecStart=/usr/bin/env\n").unwrap();
        assert!(
            plain.contains("\nEnvironment=\"LD_PRELOAD=/usr/lib/portolan/p.so\"\n"),
            "{plain}"
        );
        for line in [
            "ExecStart",
            "ExecPaths",
            "RestrictAddressFamilies",
            "BindReadOnlyPaths",
        ] {
            assert!(!plain.contains(line), "{plain}");
        }
        let confined = drop_in(&["--require", "--spin", "50"], "[Service]\nNoExecPaths=/\nExecPaths=/usr/bin\n\
             RestrictAddressFamilies=AF_INET\nTemporaryFileSystem=/run\nEnvironment=LD_PRELOAD=/x.so A=b\n").unwrap();
        for line in [
            "Environment=\"LD_PRELOAD=/usr/lib/portolan/p.so:/x.so\"",
            "Environment=PORTOLAN=require",
            "Environment=PORTOLAN_SPIN=50",
            "ExecPaths=/usr/lib/portolan",
            "RestrictAddressFamilies=AF_UNIX",
            "BindReadOnlyPaths=/run/portolan",
        ] {
            assert!(
                confined.lines().any(|found| found == line),
                "{line}: {confined}"
            );
        }
    }

    #[test]
    fn clusters_of_postgresql_have_their_environment_from_a_file() {
        let unit = Unit::parse(
            "[Service]\nExecStart=-/usr/bin/pg_ctlcluster --skip-systemctl-redirect %i start\n",
        );
        let line = Line::parse_from(["enable", "x", "--spin", "50"]);
        let preload = Path::new("/usr/lib/portolan/p.so");
        let drop_in = line.arguments.drop_in(&unit, preload).unwrap();
        assert!(
            drop_in.contains("portolan.environment:/etc/postgresql/%I/environment"),
            "{drop_in}"
        );
        let environment = line.arguments.environment(preload);
        assert!(
            environment
                .ends_with("\nLD_PRELOAD = '/usr/lib/portolan/p.so'\nPORTOLAN_SPIN = '50'\n"),
            "{environment}"
        );
    }

    #[test]
    fn what_a_drop_in_cannot_change_is_refused() {
        for (unit, part) in [
            ("PrivateNetwork=yes", "network namespace"),
            ("NetworkNamespacePath=/run/netns/x", "network namespace"),
            ("RootDirectory=/srv/x", "another root"),
            ("RestrictAddressFamilies=~AF_UNIX", "UNIX sockets"),
            ("RestrictAddressFamilies=none", "UNIX sockets"),
            ("ExecStart=-+/bin/su x", "set-user-ID"),
        ] {
            let error = drop_in(&[], &format!("[Service]\n{unit}\n"))
                .unwrap_err()
                .to_string();
            assert!(error.contains(part), "{unit}: {error}");
        }
    }

    #[test]
    fn only_services_have_a_drop_in() {
        assert_eq!(
            service_name("redis-server").unwrap(),
            "redis-server.service"
        );
        assert_eq!(
            service_name("postgresql@15-main").unwrap(),
            "postgresql@15-main.service"
        );
        assert_eq!(service_name("a.service").unwrap(), "a.service");
        for name in ["a.socket", "../x", "", "a/b", ".."] {
            assert!(service_name(name).is_err(), "{name}");
        }
    }

    #[test]
    fn a_file_of_somebody_else_stays() {
        let path = std::env::temp_dir().join(format!("portolan-drop-in-{}", std::process::id()));
        fs::write(&path, "[Service]\n").unwrap();
        assert!(ensure_own(&path).is_err());
        fs::write(&path, MARK).unwrap();
        assert!(ensure_own(&path).is_ok());
        fs::remove_file(&path).unwrap();
    }
}
