//! `portolan doctor`: checks what Portolan needs, prints one line per check, and advises how to fix each failure.
//! It changes nothing: what must be tried is tried in a network namespace of its own.

mod device;
mod host;
mod kernel;
mod service;

use std::fmt;
use std::process::Command;

use schemars::JsonSchema;
use serde::Serialize;

use crate::ServerAddress;
use crate::exit::{Failure, print};
use crate::json::print_json;

#[derive(clap::Args)]
pub(crate) struct Arguments {
    #[command(flatten)]
    server: ServerAddress,
    /// Print JSON.
    #[arg(long)]
    pub json: bool,
    /// The device to check [default: those that the server manages, or all if none is managed].
    #[arg(value_name = "IFACE")]
    interface: Option<String>,
}

pub(crate) fn run(arguments: &Arguments) -> Result<(), Failure> {
    let status = service::status(&arguments.server);
    let mut checks = kernel::checks();
    checks.extend(host::checks());
    let managed = status.as_ref().ok().map(|status| &status.interfaces[..]);
    checks.extend(device::checks(arguments.interface.as_deref(), managed));
    checks.extend(service::checks(&arguments.server, &status));
    if arguments.json {
        print_json(&checks)?;
    } else {
        for check in &checks {
            print(check)?;
        }
    }
    let failed = checks.iter().any(|check| check.verdict == Verdict::Fail);
    if failed { Err(Failure::Shown) } else { Ok(()) }
}

/// One line of the report.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, JsonSchema)]
pub(crate) struct Check {
    name: String,
    verdict: Verdict,
    /// What was found.
    detail: String,
    /// How to fix it.
    advice: Option<String>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
enum Verdict {
    Ok,
    /// Portolan works, but with restrictions, or doctor could not find out.
    Warn,
    /// Portolan does not work.
    Fail,
}

impl Check {
    fn ok(name: impl Into<String>, detail: impl Into<String>) -> Check {
        Check {
            name: name.into(),
            verdict: Verdict::Ok,
            detail: detail.into(),
            advice: None,
        }
    }

    fn warn(
        name: impl Into<String>,
        detail: impl Into<String>,
        advice: impl Into<String>,
    ) -> Check {
        let advice = Some(advice.into());
        Check {
            verdict: Verdict::Warn,
            advice,
            ..Check::ok(name, detail)
        }
    }

    fn fail(
        name: impl Into<String>,
        detail: impl Into<String>,
        advice: impl Into<String>,
    ) -> Check {
        Check {
            verdict: Verdict::Fail,
            ..Check::warn(name, detail, advice)
        }
    }
}

impl fmt::Display for Check {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let verdict = match self.verdict {
            Verdict::Ok => "ok",
            Verdict::Warn => "warn",
            Verdict::Fail => "FAIL",
        };
        write!(f, "{verdict:<5} {:<24} {}", self.name, self.detail)?;
        match &self.advice {
            Some(advice) => write!(f, "\n{:<31}-> {advice}", ""),
            None => Ok(()),
        }
    }
}

/// Runs a tool and returns its standard output, or the reason why it failed.
fn output(program: &str, arguments: &[&str]) -> Result<String, String> {
    let output = Command::new(program)
        .args(arguments)
        .output()
        .map_err(|error| format!("{program}: {error}"))?;
    if output.status.success() {
        Ok(String::from_utf8_lossy(&output.stdout).trim().to_owned())
    } else {
        Err(String::from_utf8_lossy(&output.stderr).trim().to_owned())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn advice_stands_under_what_was_found() {
        let check = Check::fail("tap devices", "no /dev/net/tun", "modprobe tun");
        let text = check.to_string();
        let (first, second) = text.split_once('\n').unwrap();
        assert_eq!(first.find("no /dev"), second.find("-> modprobe"));
    }

    #[test]
    fn every_check_that_is_not_ok_says_what_to_do() {
        let checks = [
            kernel::checks(),
            host::checks(),
            device::checks(None, Some(&[])),
        ]
        .concat();
        for check in checks.iter().filter(|check| check.verdict != Verdict::Ok) {
            assert!(check.advice.is_some(), "{check}");
        }
    }
}
