//! The settings of a service that a drop-in depends on, by the rules of systemd.unit(5) and systemd.exec(5): an empty
//! value resets a list, and drop-ins are read after the unit.

use std::fs;
use std::path::Path;

use anyhow::{Context, anyhow};

/// Where units are looked up; the first match wins.
const DIRECTORIES: [&str; 5] = [
    "/etc/systemd/system",
    "/run/systemd/system",
    "/usr/local/lib/systemd/system",
    "/usr/lib/systemd/system",
    "/lib/systemd/system",
];

/// Assignments of the section `[Service]`, in order.
#[derive(Debug, Default)]
pub(super) struct Unit(Vec<(String, String)>);

impl Unit {
    /// Reads a unit and its drop-ins, except our own.
    pub(super) fn find(name: &str) -> anyhow::Result<Unit> {
        let candidates = [Some(name.to_owned()), template(name)];
        let path = candidates
            .iter()
            .flatten()
            .flat_map(|name| DIRECTORIES.map(|directory| Path::new(directory).join(name)))
            .find(|path| path.is_file());
        let path = path.ok_or_else(|| anyhow!("there is no {name}"))?;
        let text = fs::read_to_string(&path).with_context(|| path.display().to_string())?;
        let mut unit = Unit::parse(&text);
        for directory in DIRECTORIES {
            let drop_ins = fs::read_dir(Path::new(directory).join(format!("{name}.d")));
            for drop_in in drop_ins.into_iter().flatten().flatten() {
                if drop_in.file_name() != super::FILE
                    && let Ok(text) = fs::read_to_string(drop_in.path())
                {
                    unit.0.extend(Unit::parse(&text).0);
                }
            }
        }
        Ok(unit)
    }

    pub(super) fn parse(text: &str) -> Unit {
        let mut assignments = Vec::new();
        let mut is_service = false;
        for line in text.replace("\\\n", " ").lines().map(str::trim) {
            match line.split_once('=') {
                _ if line.starts_with('[') => is_service = line == "[Service]",
                _ if line.starts_with(['#', ';']) => {}
                Some((key, value)) if is_service => {
                    assignments.push((key.trim().to_owned(), value.trim().to_owned()));
                }
                _ => {}
            }
        }
        Unit(assignments)
    }

    /// Returns all values of a list.
    fn all<'a>(&'a self, key: &str) -> Vec<&'a str> {
        let mut values = Vec::new();
        for (_, value) in self.0.iter().filter(|(name, _)| name == key) {
            if value.is_empty() {
                values.clear()
            } else {
                values.push(value.as_str())
            }
        }
        values
    }

    pub(super) fn last(&self, key: &str) -> Option<&str> {
        self.all(key).pop()
    }

    pub(super) fn is_set(&self, key: &str) -> bool {
        self.last(key)
            .is_some_and(|value| matches!(value, "yes" | "true" | "on" | "1"))
    }

    fn words(&self, key: &str) -> Vec<&str> {
        let values = self.all(key);
        values.into_iter().flat_map(str::split_whitespace).collect()
    }

    /// Returns the last value that is assigned to an environment variable.
    pub(super) fn environment(&self, name: &str) -> Option<String> {
        let words = self.words("Environment");
        let found = words.iter().rev().find_map(|word| {
            let word = word.trim_matches(['"', '\'']);
            word.strip_prefix(name)?.strip_prefix('=')
        });
        found.map(str::to_owned)
    }

    /// Returns true if NoExecPaths= forbids to execute files below `directory`, or to map them as executable.
    pub(super) fn may_not_execute(&self, directory: &Path) -> bool {
        let longest = |key: &str| {
            let paths = self
                .words(key)
                .into_iter()
                .map(|path| path.trim_start_matches(['-', '+']));
            let above = paths.filter(|path| directory.starts_with(path));
            above.map(|path| Path::new(path).components().count()).max()
        };
        match (longest("NoExecPaths"), longest("ExecPaths")) {
            (Some(forbidden), Some(allowed)) => forbidden > allowed,
            (forbidden, None) => forbidden.is_some(),
            (None, _) => false,
        }
    }

    /// Returns true if RestrictAddressFamilies= is a list of allowed families without `family`.
    pub(super) fn lacks_family(&self, family: &str) -> bool {
        let families = self.words("RestrictAddressFamilies");
        families
            .first()
            .is_some_and(|first| !first.starts_with('~'))
            && !families.contains(&family)
    }

    /// Returns true if RestrictAddressFamilies= denies `family` by name, or all families.
    pub(super) fn denies_family(&self, family: &str) -> bool {
        let families = self.words("RestrictAddressFamilies");
        match families.first() {
            Some(&"none") => true,
            Some(first) if first.starts_with('~') => families
                .iter()
                .any(|word| word.trim_start_matches('~') == family),
            _ => false,
        }
    }

    /// Returns true if the service cannot see the server's directory.
    pub(super) fn hides_run(&self) -> bool {
        ["TemporaryFileSystem", "InaccessiblePaths"]
            .into_iter()
            .any(|key| {
                let paths = self.words(key).into_iter();
                paths
                    .filter_map(|path| path.trim_start_matches(['-', '+']).split(':').next())
                    .any(|path| matches!(path, "/" | "/run"))
            })
    }

    /// Returns true if the service is one of PostgreSQL's clusters as Debian starts them.
    pub(super) fn has_cluster(&self) -> bool {
        self.programs()
            .iter()
            .any(|program| program.ends_with("/pg_ctlcluster"))
    }

    /// Returns the programs that the service starts, without the prefixes before the path.
    pub(super) fn programs(&self) -> Vec<&str> {
        let commands = self.all("ExecStart");
        commands
            .into_iter()
            .filter_map(|command| {
                let command = command.trim_start_matches(['-', '@', ':', '+', '!']);
                command.split_whitespace().next()
            })
            .collect()
    }
}

/// Returns the template of an instance: `postgresql@.service` for `postgresql@15-main.service`.
fn template(name: &str) -> Option<String> {
    let (prefix, _) = name.split_once('@')?;
    Some(format!("{prefix}@.service"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_empty_value_begins_anew() {
        let unit = Unit::parse(
            "[Unit]\nExecStart=/no\n[Service]\nExecStart=/a b\nExecStart=\nExecStart=-/c \\\n d\n# ExecStart=/e\n",
        );
        assert_eq!(unit.programs(), ["/c"]);
    }

    #[test]
    fn where_the_proxy_lies_is_compared_path_by_path() {
        let directory = Path::new("/usr/lib/portolan");
        for (text, is_forbidden) in [
            ("", false),
            ("NoExecPaths=/\n", true),
            (
                "NoExecPaths=/\nExecPaths=/usr/bin/redis-server /usr/lib /lib\n",
                false,
            ),
            ("NoExecPaths=/\nExecPaths=/usr/libexec\n", true),
            ("NoExecPaths=/usr/lib\nExecPaths=/usr\n", true),
            ("NoExecPaths=/home\n", false),
        ] {
            let unit = Unit::parse(&format!("[Service]\n{text}"));
            assert_eq!(unit.may_not_execute(directory), is_forbidden, "{text}");
        }
    }

    #[test]
    fn an_instance_has_its_templates_file() {
        assert_eq!(
            template("postgresql@15-main.service").unwrap(),
            "postgresql@.service"
        );
        assert_eq!(template("nginx.service"), None);
    }
}
