//! The sources of the configuration: the file and the command line, which takes precedence.

use std::path::{Path, PathBuf};

use super::Config;
use super::error::ConfigError;

#[derive(Clone, Debug, Default)]
pub(crate) struct ConfigSource {
    /// Without a file all values are defaults, unless the command line sets them.
    pub file: Option<PathBuf>,
    pub interfaces: Vec<String>,
    pub socket: Option<PathBuf>,
}

impl ConfigSource {
    /// Reads and checks the configuration as it is now.
    pub(crate) fn read(&self) -> Result<Config, ConfigError> {
        self.complete(match &self.file {
            Some(path) => Config::read(path)?,
            None => Config::default(),
        })
    }

    /// Likewise for a text that another process has read.
    pub(crate) fn parse(&self, text: &str) -> Result<Config, ConfigError> {
        let path = self.file.as_deref().unwrap_or(Path::new("the text"));
        self.complete(Config::parse(path, text)?)
    }

    fn complete(&self, mut config: Config) -> Result<Config, ConfigError> {
        if !self.interfaces.is_empty() {
            config.interfaces.clone_from(&self.interfaces);
        }
        if let Some(socket) = &self.socket {
            config.socket = Some(socket.clone());
        }
        config.check()?;
        Ok(config)
    }
}
